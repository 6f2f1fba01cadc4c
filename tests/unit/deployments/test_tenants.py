"""Whose a request is, and which salt its blocks get."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.edge.tenants import Tenant, Tenants, TenantUnclear, alone, salted

SECRET = b"a secret of the cluster"
PROXY = "X-Tenant"


def bearer(key: str, scheme: str = "Bearer") -> tuple[bytes, bytes]:
    return b"authorization", f"{scheme} {key}".encode()


def keyed(key: str) -> Tenant:
    return Tenants(SECRET).of([bearer(key)])


# ---- whose a request is ---------------------------------------------------------------------


def test_who_sends_another_key_or_none_is_another_tenant() -> None:
    tenants = Tenants(SECRET)
    found = [tenants.of(headers) for headers in ([], [bearer("a")], [bearer("b")], [bearer("A")])]
    assert len(set(found)) == 4
    assert found[0] == tenants.nobody


def test_the_same_key_is_the_same_tenant_in_each_ingress_and_by_each_way_to_send_it() -> None:
    ways = ([bearer("k")], [bearer("k", "bearer")], [bearer("  k ")], [(b"x-api-key", b"k")])
    assert {Tenants(SECRET).of(headers) for headers in ways} == {keyed("k")}


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"authorization", b"")],
        [(b"authorization", b"Bearer ")],
        [(b"x-api-key", b" ")],
        [(b"x-other", b"k")],
        [(b"x-tenant", b"name")],  # no proxy is configured to set it
    ],
)
def test_a_request_without_a_key_is_nobodys(headers: list[tuple[bytes, bytes]]) -> None:
    tenants = Tenants(SECRET)
    assert tenants.of(headers) == tenants.nobody


def test_credentials_of_another_scheme_are_a_key_as_they_are() -> None:
    tenants = Tenants(SECRET)
    basic = tenants.of([(b"authorization", b"Basic dTpw")])
    assert basic not in {tenants.nobody, keyed("dTpw"), tenants.of([(b"authorization", b"Basic")])}


def test_another_secret_makes_other_tenants() -> None:
    assert Tenants(b"another secret here").of([bearer("k")]) != keyed("k")


def test_the_name_that_a_proxy_gives_counts_before_the_key() -> None:
    tenants = Tenants(SECRET, header=PROXY)
    ann = [(b"x-tenant", b"ann")]
    assert tenants.of([*ann, bearer("k")]) == tenants.of(ann) == tenants.of([bearer("j"), *ann])
    assert tenants.of(ann) not in {keyed("ann"), tenants.of([(b"x-tenant", b"ben")])}
    # Past the proxy there is the key alone, or nobody.
    assert tenants.of([bearer("k"), (b"x-tenant", b" ")]) == keyed("k")
    assert tenants.of([]) == tenants.nobody


@pytest.mark.parametrize("name", ["authorization", "x-api-key", "x-tenant"])
def test_two_values_of_a_header_that_names_the_tenant_are_refused(name: str) -> None:
    tenants = Tenants(SECRET, header=PROXY)
    with pytest.raises(TenantUnclear, match=name):
        tenants.of([(name.encode(), b"ann"), (name.encode(), b"ben")])
    tenants.of([(name.encode(), b"ann"), (name.encode(), b" ann")])
    tenants.of([(b"accept", b"a"), (b"accept", b"b")])


# ---- a file of keys -------------------------------------------------------------------------


def with_file(folder: Path, text: str, header: str = "") -> Tenants:
    (folder / "keys").write_text(text)
    return Tenants(SECRET, header=header, keys_file=str(folder / "keys"))


def test_keys_of_one_name_are_one_tenant_and_others_stay_their_own(tmp_path: Path) -> None:
    tenants = with_file(tmp_path, "# names\n\nann old-key\n ann   new-key \nben bens\n")
    old, new, ben = (tenants.of([bearer(key)]) for key in ("old-key", "new-key", "bens"))
    assert old == new
    assert len({old, ben, keyed("old-key"), keyed("new-key"), keyed("bens")}) == 5
    assert tenants.of([bearer("unlisted")]) == keyed("unlisted")
    assert tenants.of([]) == tenants.nobody


def test_who_sends_a_name_for_a_key_is_not_that_tenant(tmp_path: Path) -> None:
    tenants = with_file(tmp_path, "ann secret-key\n")
    assert tenants.of([bearer("ann")]) != tenants.of([bearer("secret-key")])


def test_a_proxy_and_a_file_mean_the_same_by_a_name(tmp_path: Path) -> None:
    tenants = with_file(tmp_path, "ann secret-key\n", PROXY)
    assert tenants.of([(b"x-tenant", b"ann")]) == tenants.of([bearer("secret-key")])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ann\n", "line 1: must be NAME KEY"),
        ("ann one\nben two three\n", "line 2: must be NAME KEY"),
        ("ann k\nben k\n", "line 2: this key has another name above"),
    ],
)
def test_a_file_that_is_unclear_stops_the_ingress_and_no_key_is_told(
    tmp_path: Path, text: str, words: str
) -> None:
    with pytest.raises(RuntimeError, match=words) as told:
        with_file(tmp_path, text)
    assert "three" not in str(told.value)


def test_a_file_that_is_missing_stops_the_ingress(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"tenants\.keys_file .* cannot be read"):
        Tenants(SECRET, keys_file=str(tmp_path / "none"))


# ---- salts ----------------------------------------------------------------------------------

SALTS = st.none() | st.text(max_size=12)
KEYS = st.text("ab", min_size=1, max_size=3)


@given(st.lists(st.tuples(KEYS, SALTS), min_size=2, max_size=6, unique=True))
def test_two_tenants_or_two_of_a_tenants_salts_never_give_one_salt(
    asked: list[tuple[str, str | None]],
) -> None:
    salts = [salted(keyed(key), salt) for key, salt in asked]
    assert len(set(salts)) == len(asked)
    assert salts == [salted(keyed(key), salt) for key, salt in asked]


def test_no_salt_that_a_client_can_send_is_anothers() -> None:
    """Not its key, its name, what the server derives for it, nor what joins to the same text."""
    ann, ben, nobody = keyed("ann"), keyed("ben"), Tenants(SECRET).nobody
    anns = {salted(ann, salt) for salt in (None, "", "own")}
    guesses = ["ann", "Bearer ann", ann.hex(), ben.hex(), nobody.hex(), *anns, "", "own", "\0", "1"]
    for tenant, guess in itertools.product((ben, nobody, alone()), [None, *guesses]):
        assert salted(tenant, guess) not in anns


def test_every_request_is_salted_nobodys_too() -> None:
    salt = salted(Tenants(SECRET).nobody, None)
    assert len(bytes.fromhex(salt)) == 32


def test_what_came_by_no_request_shares_with_nothing() -> None:
    assert alone() != alone()
