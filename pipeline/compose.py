"""From command-line overrides to a typed, checked, named run. All of Hydra is in here and in __main__."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, OverrideParseException
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from pipeline import checks, layout_names
from pipeline.config import EXPERIMENT_KEYS, Config, flatten, short_hash, to_config
from pipeline.errors import UserError
from pipeline.paths import ROOT
from pipeline.registry import Run

CONF = ROOT / "conf"
# Keys that a run's key spells out, or that change neither the work nor what is compared. Every other change is hashed into the key.
UNHASHED = layout_names.SPELLED | {
    "verify",
    "kernels.case",
    "kernels.attention",
    "kernels.ffn",
    "kernels.logp",
    "name",
    "launch.idle_seconds",
    "launch.timeout_seconds",
}

# Keys of checkpoint and data that change nothing in their folders.
NAMELESS = {"checkpoint.name", "data.name", "data.reward"}


class NamedLayouts(ConfigSource):
    """`layout=tp2cp4z3-m1`: layouts that no file has to spell out (pipeline/layout_names.py). A file of the name in conf/ comes first."""

    @staticmethod
    def scheme() -> str:
        return "names"

    def load_config(self, config_path: str) -> ConfigResult:
        values = self._parse(config_path)
        if values is None:
            raise ConfigLoadError(f"{config_path}: no name of a layout")
        config = OmegaConf.create()
        for key, value in values.items():
            OmegaConf.update(config, key, value)
        return ConfigResult(provider=self.provider, path=config_path, config=config, header={"package": "_global_"})

    def is_config(self, config_path: str) -> bool:
        return self._parse(config_path) is not None

    @staticmethod
    def _parse(config_path: str) -> dict[str, Any] | None:
        group, _, name = config_path.removesuffix(".yaml").rpartition("/")
        return layout_names.parse(name) if group == "layout" else None

    def is_group(self, config_path: str) -> bool:
        return config_path in ("", "layout")

    def available(self) -> bool:
        return True

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        return []


def register_schema() -> None:
    """`schema` of conf/config.yaml is pipeline/config.py: Hydra then knows each key and its type."""
    ConfigStore.instance().store(name="schema", node=Config)
    Plugins.instance().register(NamedLayouts)
    OmegaConf.register_new_resolver("lockstep_root", lambda: str(ROOT), replace=True)


@contextmanager
def composing(conf: Path = CONF) -> Iterator[None]:
    """Hydra outside its own command: inside the block `compose_run` works. Not nested in a Hydra application."""
    register_schema()
    _composed.cache_clear()
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(conf), version_base="1.3"):
        yield


def compose_run(overrides: list[str], root: Path = ROOT) -> Run:
    """The run of a command line, checked. Raises UserError; starts and writes nothing."""
    with one_line_errors():
        keys = _keys(overrides)
        composed = _composed(tuple(overrides))
        cfg = to_config(OmegaConf.create(composed))
    checks.check(cfg, root)
    choices = {key: override for key, override in zip(keys, overrides) if "." not in key}
    # The run's key tells it from what its presets say: values in conf/ may change without a new key.
    preset = _composed(tuple(o for key, o in choices.items() if key in ("experiment", "kernels")))
    groups = _composed(tuple(o for key, o in choices.items() if key in ("experiment", "checkpoint", "data")))
    spelled = _changes(composed, preset)
    changes = {key: value for key, value in spelled.items() if key not in UNHASHED and not key.startswith("tracking.")}
    for section, group in (("checkpoint.", cfg.checkpoint), ("data.", cfg.data)):
        own = {k: v for k, v in _changes(composed, groups).items() if k.startswith(section) and k not in NAMELESS}
        if own:  # an overridden checkpoint is another folder
            group.name = f"{group.name}-{short_hash(own)}"
    experiment_changes = {key: value for key, value in changes.items() if key.split(".")[0] in EXPERIMENT_KEYS}
    layout = layout_names.name_of(cfg.layout, cfg.launch, set(spelled))
    return Run(_key(cfg, [layout], changes), _key(cfg, [], experiment_changes), cfg, list(overrides))


def _changes(composed: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    before = flatten(base)
    return {key: value for key, value in flatten(composed).items() if before.get(key) != value}


def _key(cfg: Config, parts: list[str], changes: dict[str, Any]) -> str:
    case = [] if cfg.kernels.case_id == "R/R" else [re.sub(r"[+=]", "", cfg.kernels.case_id.replace("R/R+", "")).replace("/", "_")]
    return "-".join([cfg.name, *parts, *case, *([short_hash(changes)] if changes else [])])


def _keys(overrides: list[str]) -> list[str]:
    return [o.get_key_element().lstrip("+~") for o in OverridesParser.create().parse_overrides(overrides)]


@cache
def _composed(overrides: tuple[str, ...]) -> dict[str, Any]:
    composed = hydra.compose("config", list(overrides))
    return OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)  # type: ignore[return-value]


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Hydra's and OmegaConf's errors as UserError: key, value, remedy on one line."""
    try:
        yield
    except MissingMandatoryValue as error:
        raise UserError(f"{_key_of(error)}: is missing; give it on the command line or in conf/") from error
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(_one_line(error)) from error


def _one_line(error: Exception) -> str:
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    full, text = " ".join(str(error).split()), " ".join(str(cause).split())
    if isinstance(error, OverrideParseException):
        return f"{error.override!r}: can't be read; write key=value, with quotes around special characters"
    if match := re.search(r"Ambiguous value for argument '([^']+)'", full):
        return f"{match[1]}: several values need -m"
    if match := re.search(r"Could not find '([^']+)/([^'/]+)'", full):
        known = sorted(path.stem for path in (CONF / match[1]).glob("*.yaml"))
        names = f", or {layout_names.HELP}" if match[1] == "layout" else ""
        return f"{match[1]}={match[2]}: no such choice; use {', '.join(known) or 'none'}{names}"
    key = _key_of(cause) or next(iter(re.findall(r"Could not (?:override|append to config|delete from config)[^']*'([^']+)'", full)), "")
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) or "not in struct" in full:
        close = get_close_matches(key, _known_keys(), n=1)
        return f"{key}: unknown key; " + (f"did you mean {close[0]}?" if close else "`python -m pipeline --cfg job` prints all keys")
    text = re.sub(r"\s*(full_key|object_type|reference_type): .*$", "", text)
    return f"{key}: {text[0].lower()}{text[1:]}" if key and not text.startswith(key) else text


def _known_keys() -> list[str]:
    return list(flatten(OmegaConf.to_container(OmegaConf.structured(Config))))  # type: ignore[arg-type]


def _key_of(error: Exception) -> str:
    return str(getattr(error, "full_key", None) or "")
