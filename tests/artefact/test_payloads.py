"""A payload for a product is refused where other versions are installed than those that made it."""

import pytest
import torch

from k31compile.cache.artefact.payloads import cann_version, check_payload, installed_versions
from k31compile.errors import ArtefactError
from k31compile.targets.ascend import providers

VERSIONS = {"torch": "2.0.0", "torch_npu": "2.0.0.post1", "CANN": "8.5.0", "fla_npu": "26.6"}
PAYLOAD = {"name": "decode", "versions": VERSIONS}


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """The packages that are here, by distribution; and CANN where a test writes its file."""
    here = {}
    monkeypatch.setattr(providers, "installed_version", here.get)
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    monkeypatch.delenv("ASCEND_TOOLKIT_HOME", raising=False)
    return here


def test_where_nothing_of_it_is_installed_it_may_be_looked_at(installed):
    check_payload(PAYLOAD, "f.k31")


def test_the_same_versions_are_taken_however_they_were_built(installed, monkeypatch, tmp_path):
    monkeypatch.setattr(torch, "__version__", "2.0.0+cpu")
    installed.update({"torch-npu": "2.0.0.post1+gitabc", "fla-npu": "26.6"})
    (tmp_path / "version.info").write_text("name=cann\nVersion=8.5.0\n")
    assert cann_version() == "8.5.0"
    check_payload(PAYLOAD, "f.k31")


@pytest.mark.parametrize("other", [{"torch-npu": "2.0.0.post2"}, {"fla-npu": "26.7"}, {"torch-npu": "2.0.0.post1"}])
def test_another_version_is_refused_by_name(installed, other):
    """The last one is that of torch, which counts once there is a torch_npu."""
    installed.update(other)
    name = "torch" if other == {"torch-npu": "2.0.0.post1"} else next(iter(other)).replace("-", "_")
    with pytest.raises(ArtefactError, match=rf"'decode' was made with {name} \S+, here it is .*f\.k31"):
        check_payload(PAYLOAD, "f.k31")


def test_another_cann_is_refused(installed, tmp_path):
    (tmp_path / "version.info").write_text("Version=8.3.RC1\n")
    with pytest.raises(ArtefactError, match=r"made with CANN 8\.5\.0, here it is 8\.3\.RC1"):
        check_payload(PAYLOAD, "f.k31")


def test_what_has_no_version_is_left_out(installed):
    installed["torch-npu"] = "2.0.0"
    assert installed_versions(dict.fromkeys(["formula", "torch_npu", "nobodys", "fla_npu"])) == {"torch_npu": "2.0.0"}
    assert set(installed_versions(dict.fromkeys(providers.PROVIDERS))) == {"torch_npu"}
