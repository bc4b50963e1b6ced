"""The index of a checkpoint in the format of torch.distributed.checkpoint, read without running any code.

That format keeps its index, `.metadata`, as a pickle, and a pickle can name any function to call. A
checkpoint may come from a stranger, so `read_index` builds only the few classes that such an index consists
of. Entries that torch would unpickle without limits (objects other than tensors) are rejected as well, and so
are files outside the checkpoint. Tensors themselves are read by torch with `weights_only`.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path, PurePath
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, filesystem, metadata

from dflash_core.errors import UserError

INDEX_FILE = ".metadata"
_METADATA_CLASSES = (
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "_MEM_FORMAT_ENCODING",
)
_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
# Where the checkpoint was written, which nothing reads. Newer releases of Python name another module.
_PATHS = {
    (module, name): lambda *parts: "/".join(map(str, parts))
    for module in ("pathlib", "pathlib._local")
    for name in ("PosixPath", "WindowsPath", "PurePosixPath")
}
_ALLOWED: dict[tuple[str, str], Any] = {
    **{(metadata.__name__, name): getattr(metadata, name) for name in _METADATA_CLASSES},
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): lambda name: {"torch.strided": torch.strided}[name],
    **{("torch", name): dtype for name, dtype in _DTYPES.items()},
    **_PATHS,
}


class _IndexUnpickler(pickle.Unpickler):
    """Unpickler of nothing but an index of tensors."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of an index of tensors")
        return _ALLOWED[module, name]


class CheckpointReader(FileSystemReader):
    """torch's reader of a checkpoint directory, with the index of `read_index`."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        index = read_index(Path(self.path))
        index.storage_meta = metadata.StorageMeta(load_id=self.load_id)
        return index


def read_index(checkpoint: Path) -> metadata.Metadata:
    """Return the index of a checkpoint.

    Raises:
        UserError: it is damaged, names other classes or functions than an index consists of, holds objects
            other than tensors, or names files outside the checkpoint.
    """
    path = checkpoint / INDEX_FILE
    try:
        index = _IndexUnpickler(io.BytesIO(path.read_bytes())).load()
        _check(index, checkpoint)
    except Exception as error:
        # A damaged pickle raises any exception.
        raise UserError(
            f"{path}: not an index of tensors: {error or type(error).__name__}; allowed: a checkpoint that "
            "this program wrote. Nothing of it was executed"
        ) from error
    return index


def is_plain_name(name: str) -> bool:
    """Return True for the name of a file directly inside a directory."""
    return bool(name) and name != ".." and PurePath(name).name == name


def _check(index: Any, checkpoint: Path) -> None:
    """Check types that the reader relies on.

    Raises:
        ValueError: one is wrong.
    """
    if not isinstance(index, metadata.Metadata) or not isinstance(index.state_dict_metadata, dict):
        raise ValueError(f"it holds {type(index).__name__}")
    for name, entry in index.state_dict_metadata.items():
        if not isinstance(entry, metadata.TensorStorageMetadata) or not isinstance(entry.size, torch.Size):
            raise ValueError(f"entry {name!r} is not a tensor")
    for place in index.storage_data.values():
        file = place.relative_path
        if not isinstance(file, str) or not is_plain_name(file):
            raise ValueError(f"it names the file {file!r}, which is not directly inside {checkpoint}")
        if getattr(place, "transform_descriptors", None):
            raise ValueError(f"it asks for {place.transform_descriptors!r}; no transformation is allowed")
