"""A checkpoint on the Hub, by ranged reads of its shard headers: kilobytes instead of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness.errors import CheckpointError
from harness.exl3.checkpoint import Checkpoint
from harness.exl3.files import INDEX, chosen_files, read_json, weight_map
from harness.exl3.headers import TensorHeader, make_header
from harness.progress import phase

_CHECK = "check the name, --revision and the connection; a gated model needs `hf auth login`"


def open_hub(repo: str, revision: str | None = None) -> Checkpoint:
    """Headers of the shards of a Hub repository, chosen as those of a folder are; its weights stay there.

    Raises:
        CheckpointError: no such repository or revision, no shards, a damaged one, or no connection.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    with hub_in_one_line(repo):
        # This call does not retry, so a missing network shows at once.
        listed = api.model_info(repo, revision=revision, timeout=20, files_metadata=True).siblings
    files = {file.rfilename: file.size or 0 for file in listed or ()}
    shards = sorted(path for path in files if path.endswith(".safetensors") and "/" not in path)
    if not shards:
        raise CheckpointError(f"{repo} is not a checkpoint: it holds no *.safetensors file", _CHECK)
    mapping = None
    if INDEX in files:
        with hub_in_one_line(repo):
            mapping = weight_map(Path(api.hf_hub_download(repo, INDEX, revision=revision)).read_bytes())
    shards, stale = chosen_files(Path(repo), shards, mapping)
    tensors: dict[str, TensorHeader] = {}
    with phase(f"headers of {repo}", total=len(shards), unit="tensors", item="shard") as advance:
        for shard in shards:
            with hub_in_one_line(repo):
                metadata = api.parse_safetensors_file_metadata(repo, shard, revision=revision)
            found = _headers(repo, shard, files[shard], metadata)
            tensors |= found
            advance(1, len(found))
    return Checkpoint(name=repo, tensors=tensors, config=_config(api, repo, revision, files), notes=stale)


def _headers(repo: str, shard: str, size: int, metadata: Any) -> dict[str, TensorHeader]:
    try:
        found = {
            name: make_header(name, shard, {"dtype": i.dtype, "shape": i.shape, "data_offsets": i.data_offsets}, 0)
            for name, i in metadata.tensors.items()
        }
    except ValueError as error:
        raise CheckpointError(f"{repo}: {shard} has a damaged header: {error}", "ask the maker of the quant") from error
    end = max((header.start + header.bytes for header in found.values()), default=0)
    if end + 8 > size:
        raise CheckpointError(
            f"{repo}: {shard} is truncated on the Hub: {end:,} bytes of tensors by its header, {size:,} in the file",
            "ask the maker of the quant to upload it again",
        )
    return found


def _config(api: Any, repo: str, revision: str | None, files: dict[str, int]) -> dict[str, Any]:
    if "config.json" not in files:
        return {}
    with hub_in_one_line(repo):
        return read_json(Path(api.hf_hub_download(repo, "config.json", revision=revision)))


@contextmanager
def hub_in_one_line(repo: str) -> Iterator[None]:
    """Turn what the Hub client raises into one line."""
    from huggingface_hub import errors as hub

    # The client's own HTTP library differs between its versions; the base class of its error tells which.
    transport: type[Exception] = next(base for base in hub.HfHubHTTPError.__mro__ if base.__name__ == "HTTPError")
    try:
        yield
    except hub.RepositoryNotFoundError as error:
        raise CheckpointError(f"{repo} is neither a folder here nor a repository on the Hub", _CHECK) from error
    except hub.RevisionNotFoundError as error:
        raise CheckpointError(f"{repo} has no such revision", _CHECK) from error
    except hub.SafetensorsParsingError as error:
        raise CheckpointError(f"{repo}: {str(error).splitlines()[0]}", "ask the maker of the quant") from error
    except (transport, hub.OfflineModeIsEnabled, hub.LocalEntryNotFoundError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(f"{repo} is no folder here, and the Hub cannot be asked: {lines[0]}", _CHECK) from error
