"""One browser for the tests of a module, a tab and a stub ingress for each."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.browser.chromium import PROGRAM, Page, chromium, new_page
from tests.browser.stub_ingress import StubIngress, stub_ingress


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a running Chromium's DevTools."""
    if shutil.which(PROGRAM) is None:
        pytest.skip(f"missing: {PROGRAM}")
    with chromium(tmp_path_factory.mktemp("chromium")) as address:
        yield address


@pytest.fixture
async def page(browser: str) -> AsyncIterator[Page]:
    """A tab, which must have had nothing to complain of when the test is over."""
    async with new_page(browser) as made:
        yield made
        assert made.complaints == []


@pytest.fixture
async def stub() -> AsyncIterator[StubIngress]:
    async with stub_ingress() as made:
        yield made
