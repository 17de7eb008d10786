"""A Hub repository is read by its shard headers alone. The Hub is a local folder behind the client's own methods."""

from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import HfApi, parse_local_safetensors_file_metadata
from huggingface_hub.errors import RepositoryNotFoundError, SafetensorsParsingError

from harness.errors import CheckpointError
from harness.exl3.census import take_census
from harness.exl3.checkpoint import open_checkpoint
from harness.exl3.hub import open_hub
from tests.exl3.made_folders import packed, write

REPO = "someone/some-quant-exl3"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A folder with two shards, served by patched client methods; every revision asked for is recorded."""
    first, second = packed("model.layers.0.mlp.up_proj", bits=3), {"lm_head.weight": torch.zeros(32, 128).half()}
    folder = write(tmp_path / "repo", first, second, config={"quantization_config": {"bits": 2}})
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    asked = []

    def model_info(self, repo, *, revision, timeout, files_metadata):
        asked.append(revision)
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=n, size=s) for n, s in sizes.items()])

    def metadata(self, repo, filename, *, revision):
        asked.append(revision)
        return parse_local_safetensors_file_metadata(folder / filename)

    def download(self, repo, filename, *, revision):
        asked.append(revision)
        return str(folder / filename)

    monkeypatch.setattr(HfApi, "model_info", model_info)
    monkeypatch.setattr(HfApi, "parse_safetensors_file_metadata", metadata)
    monkeypatch.setattr(HfApi, "hf_hub_download", download)
    return SimpleNamespace(folder=folder, sizes=sizes, asked=asked)


def test_census_equals_that_of_the_downloaded_folder(hub):
    remote, local = take_census(open_hub(REPO, "4.0bpw")), take_census(open_checkpoint(hub.folder))
    assert remote.as_json() | {"name": ""} == local.as_json() | {"name": ""}
    assert remote.name == REPO and remote.mismatches and set(hub.asked) == {"4.0bpw"}


def test_weights_of_a_repository_are_not_here(hub):
    with pytest.raises(CheckpointError, match="only its headers were read"):
        open_hub(REPO).linear("model.layers.0.mlp.up_proj")


def test_a_shard_cut_on_the_hub_is_noticed(hub):
    hub.sizes["model-00002-of-00002.safetensors"] = 4096
    with pytest.raises(CheckpointError, match="model-00002-of-00002.safetensors is truncated on the Hub"):
        open_hub(REPO)


def test_no_shards(hub):
    hub.sizes.clear()
    hub.sizes["README.md"] = 10
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        open_hub(REPO)


def not_found(message):
    response = SimpleNamespace(headers={}, request=None, status_code=404, url="")
    return RepositoryNotFoundError(message, response=response)


def connect_error():
    from huggingface_hub.errors import HfHubHTTPError

    transport = next(base for base in HfHubHTTPError.__mro__ if base.__name__ == "HTTPError")
    return transport("[Errno -2] Name or service not known")


@pytest.mark.parametrize(
    "method, make, message",
    [
        ("model_info", lambda: not_found("404"), "is neither a folder here nor a repository on the Hub"),
        ("model_info", connect_error, "the Hub cannot be asked: \\[Errno -2\\]"),
        ("parse_safetensors_file_metadata", lambda: SafetensorsParsingError("bad header\nmore"), "bad header"),
    ],
)
def test_errors_of_the_client_become_one_line(hub, monkeypatch, method, make, message):
    def fail(*args, **kwargs):
        raise make()

    monkeypatch.setattr(HfApi, method, fail)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_hub(REPO)
    assert "\n" not in caught.value.what


def test_offline_is_one_line(monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="the Hub cannot be asked") as caught:
        open_hub(REPO)
    assert "\n" not in caught.value.what


def test_the_index_decides_which_files_are_the_model(hub):
    """A backup beside the shards is no part of it, as in a folder."""
    import json

    (hub.folder / "backup.safetensors").write_bytes((hub.folder / "model-00001-of-00002.safetensors").read_bytes())
    names = {name: header.shard for name, header in open_checkpoint(hub.folder).tensors.items()}
    (hub.folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    hub.sizes.update({path.name: path.stat().st_size for path in hub.folder.iterdir()})
    assert {header.shard for header in open_hub(REPO).tensors.values()} == set(names.values())
