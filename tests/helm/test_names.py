"""Names: whatever releases and models are called, Kubernetes and KubeRay take what comes out."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helm import crd
from tests.helm.chart import Helm, Json, Manifests

DNS_1123 = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
MODELS = (
    "SmolLM2-135M-Instruct",
    "a.b/c_d",
    "m" * 70,
    "1leading-digit",
    "-._",
    'quo"te: {x} #y',
    "名前",
    "trailing-",
)
WORDS = ("true", "on", "no", "null", "y")  # which YAML takes for something else
RELEASES = ("hw", "r" * 53, "a.b.c", "1st", "x-headwater-y", "0" * 40)


def names(manifests: Manifests) -> list[str]:
    found = [one["metadata"]["name"] for one in manifests]
    name = manifests.one("RayService")["metadata"]["name"]
    # What KubeRay makes from it: clusters, their pods, services.
    return [*found, f"{name}-abcde-head-svc", f"{name}-head-svc", f"{name}-serve-svc"]


def model_label(manifests: Manifests) -> str:
    found: str = manifests.pod("decode")["metadata"]["labels"]["headwater/model"]
    return found


def named(helm: Helm, model: str) -> Manifests:
    return helm.render("--set-json", f"model.servedName={json.dumps(model)}")


@pytest.mark.parametrize("model", MODELS)
def test_an_odd_model_name_is_served_as_it_is_and_labelled_as_a_label_may_be(
    helm: Helm, model: str
) -> None:
    manifests = named(helm, model)
    assert crd.go_faults(manifests) == []
    config: Json = manifests.application["args"]["config"]
    assert config["model"]["served_name"] == model
    label = model_label(manifests)
    assert 0 < len(label) <= 63
    assert crd.LABEL_VALUE.fullmatch(label)
    (env,) = [
        one["value"]
        for one in manifests.one("Pod")["spec"]["containers"][0]["env"]
        if one["name"] == "MODEL"
    ]
    assert env == model


def test_models_that_differ_have_labels_that_differ(helm: Helm) -> None:
    long = ["m" * 70, "m" * 71, "a.b/c_d", "a.b_c_d", *MODELS]
    labels = {model: model_label(named(helm, model)) for model in dict.fromkeys(long)}
    assert len(set(labels.values())) == len(labels)


@pytest.mark.parametrize("release", RELEASES)
def test_every_name_from_an_odd_release_is_valid(helm: Helm, release: str) -> None:
    manifests = helm.render(release=release)
    assert crd.go_faults(manifests) == []
    for name in names(manifests):
        assert len(name) <= 63 and DNS_1123.fullmatch(name), name
    for one in manifests.of("Service"):
        assert crd.LABEL_1035.fullmatch(one["metadata"]["name"])


@pytest.mark.parametrize("word", WORDS)
def test_a_name_that_is_a_word_of_yamls_stays_a_name(helm: Helm, word: str) -> None:
    manifests = helm.render("--set-string", f"fullnameOverride={word}")
    assert manifests.one("RayService")["metadata"]["name"] == word
    assert manifests.one("Service", word)["spec"]["selector"]["app.kubernetes.io/instance"] == word
    for group in manifests.groups:
        assert manifests.pod(group)["spec"]["serviceAccountName"] == word
    assert all(isinstance(name, str) for name in names(manifests))


def test_releases_that_differ_only_at_the_end_stay_apart(helm: Helm) -> None:
    both = [names(helm.render(release="r" * 52 + end)) for end in "xy"]
    assert not {*both[0]} & {*both[1]}
    dotted = [names(helm.render(release=release)) for release in ("a.b", "a-b")]
    assert not {*dotted[0]} & {*dotted[1]}


@settings(max_examples=10)
@given(
    text=st.text(st.characters(codec="utf-8", exclude_categories=("C",)), min_size=1, max_size=80)
)
def test_any_name_at_all_can_be_made_one_of_kuberays(helm: Helm, text: str) -> None:
    name = helm.render("--set-json", f"fullnameOverride={json.dumps(text)}").one("RayService")
    assert crd.LABEL_1035.fullmatch(name["metadata"]["name"])
    assert len(name["metadata"]["name"]) <= crd.NAME_LENGTH_MAX
