"""Checkpoints from a folder on this machine, and the rules every published folder has to keep: weights as safetensors, no pickle."""

from __future__ import annotations

import fnmatch
import os
import shutil
from pathlib import Path

from pipeline.config import Checkpoint
from pipeline.errors import MissingPrerequisite, UserError
from pipeline.progress import Progress

WEIGHTS = ["model.safetensors", "model-*.safetensors", "model.safetensors.index.json"]
TOKENIZER = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
]
PUBLISHED_FILES = ["config.json", "generation_config.json", "chat_template.jinja", "LICENSE*", *TOKENIZER, *WEIGHTS]
PICKLES = ["*.bin", "*.pt", "*.pth", "*.pkl", "*.pickle", "*.ckpt"]
_CHUNK = 1 << 24


def copy_local(checkpoint: Checkpoint, folder: Path) -> None:
    """Copy configuration, tokenizer and safetensors of `checkpoint.repo` (a folder) into `folder`; nothing else, no code, no pickle.

    Raises MissingPrerequisite when there is no such folder, UserError for pickle weights and for links that lead out of the folder.
    """
    source = Path(checkpoint.repo or "").expanduser()
    if not checkpoint.repo or not source.is_dir():
        raise MissingPrerequisite(f"checkpoint.repo={checkpoint.repo}: no such folder; name one with config.json and *.safetensors")
    root = source.resolve()
    names = published_names(os.listdir(root), str(checkpoint.repo))
    paths = [root / name for name in names]
    for name, path in zip(names, paths, strict=True):
        if not path.resolve().is_relative_to(root):
            raise UserError(f"checkpoint.repo={checkpoint.repo}: {name} is a link out of the folder; replace it by the file itself")
    with Progress(f"copy {checkpoint.name}", sum(path.stat().st_size for path in paths), unit="B") as progress:
        for name, path in zip(names, paths, strict=True):
            with open(path, "rb") as read, open(folder / name, "wb") as write:
                while chunk := read.read(_CHUNK):
                    write.write(chunk)
                    progress.advance(len(chunk))


def published_names(names: list[str], where: str) -> list[str]:
    """The files of a published folder that we take, sorted.

    Raises UserError for names that leave the folder and where the only weights are pickle files, which run code when they are loaded.
    """
    taken = sorted(name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in PUBLISHED_FILES))
    for name in taken:
        check_plain_name(name, where)
    if not any(name.endswith(".safetensors") for name in taken):
        pickles = sorted(name for name in names if any(fnmatch.fnmatch(name, pattern) for pattern in PICKLES))
        if pickles:
            raise UserError(f"checkpoint.repo={where}: {pickles[0]} is a pickle checkpoint, which can run code; convert it to safetensors")
        raise UserError(f"checkpoint.repo={where}: no *.safetensors in it; name a checkpoint that has them")
    if "config.json" not in taken:
        raise UserError(f"checkpoint.repo={where}: no config.json in it; name a folder in Hugging Face layout")
    return taken


def check_plain_name(name: str, where: str) -> None:
    """Refuse a file name that comes from outside and is more than a name: it could be written anywhere."""
    if name in ("", ".", "..") or name != os.path.basename(name) or "\\" in name or "\0" in name:
        raise UserError(f"checkpoint.repo={where}: file name {name!r} leads out of the folder; this source is not to be trusted")


def move_published(source: Path, folder: Path, where: str) -> None:
    """Move the files we take out of a download folder; a link in it is followed only to copy its bytes from inside `source`."""
    root = source.resolve()
    for name in published_names([path.name for path in root.iterdir() if path.is_file()], where):
        path = root / name
        if not path.is_symlink():
            os.replace(path, folder / name)
        elif path.resolve().is_relative_to(root):
            shutil.copyfile(path, folder / name)
        else:
            raise UserError(f"checkpoint.repo={where}: {name} is a link out of the download; this source is not to be trusted")
