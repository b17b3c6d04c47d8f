"""Where Megatron keeps its batch path, and putting something else there.

| megatron.core | function                                              | who calls `next`               |
|---------------|-------------------------------------------------------|--------------------------------|
| 0.12 - 0.17   | megatron.training.utils, takes `data_iterator`        | the function                   |
| 0.18 - 0.19   | megatron.core.utils, takes `batch`, a pure function   | the script's own get_batch     |

MindSpeed-LLM puts its own function in the first place (read from its sources at c77308a1, never run here). The
function is recognised by name and signature, and what it returns is read from its own source: the keys of the last
`batch = {...}` in it, and whether it returns a pair. A Megatron that has changed any of this is refused, not guessed
at.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from headrace.errors import ConfigError

NAME = "get_batch_on_this_tp_rank"
MODULES = ("megatron.training.utils", "megatron.core.utils")
OLDEST, NEWEST = (0, 12), (0, 19)

# What is read of the arguments; the others only say how to broadcast.
_KNOWN_ITERATOR_PARAMETERS = {"data_iterator", "mtp_on_this_rank"}
_NEEDED_BATCH_PARAMETERS = {
    "batch", "tp_rank", "mtp_on_this_rank", "pipeline_model_parallel_size", "is_pipeline_first_stage",
    "is_pipeline_last_stage",
}  # fmt: skip
KNOWN_KEYS = {
    "tokens", "labels", "loss_mask", "attention_mask", "position_ids", "cu_seqlens", "cu_seqlens_padded", "max_seqlen",
    "local_cp_size", "hybrid_cp_group",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """The function that is to be replaced, and its contract."""

    original: Callable[..., Any]
    takes: Literal["data_iterator", "batch"]
    keys: tuple[str, ...]
    """Of the dict it returns, in its order: get_batch unpacks `batch.values()`."""
    returns_pair: bool
    """(batch, actual_seq_len), as some versions of MindSpeed-LLM do."""
    is_mindspeed: bool

    @property
    def signature(self) -> inspect.Signature:
        return inspect.signature(inspect.unwrap(self.original))


def find_place() -> Place:
    """The batch path of the Megatron that is loaded. ConfigError, naming the version, if it is not a known one."""
    version = _version()
    _check_version(version)
    original = next((found for module in MODULES if (found := getattr(sys.modules.get(module), NAME, None))), None)
    if original is None:
        raise ConfigError(f"megatron.core {version} has no {NAME} in {' or '.join(MODULES)}: not a Megatron known here")
    function = inspect.unwrap(original)
    parameters = list(inspect.signature(function).parameters)
    if parameters[:1] == ["data_iterator"] and set(parameters) <= _KNOWN_ITERATOR_PARAMETERS:
        takes: Literal["data_iterator", "batch"] = "data_iterator"
    elif parameters[:1] == ["batch"] and set(parameters) >= _NEEDED_BATCH_PARAMETERS:
        takes = "batch"
    else:
        raise ConfigError(f"megatron.core {version}: {NAME}({', '.join(parameters)}) is no signature known here")
    keys, returns_pair = _returned(function, version)
    return Place(
        original=original,
        takes=takes,
        keys=keys,
        returns_pair=returns_pair,
        is_mindspeed=function.__module__.startswith("mindspeed"),
    )


def replace_everywhere(original: Any, replacement: Any) -> int:
    """Bind every module's name for `original` to `replacement`: scripts import it by `from ... import`. How many."""
    count = 0
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if isinstance(names, dict):
            for name in [name for name, value in list(names.items()) if value is original]:
                names[name] = replacement
                count += 1
    return count


def _version() -> str:
    return str(getattr(sys.modules.get("megatron.core"), "__version__", "without a version"))


def _check_version(version: str) -> None:
    try:
        major, minor = (int(part) for part in version.split(".")[:2])
    except ValueError:
        major, minor = -1, -1
    if not OLDEST <= (major, minor) <= NEWEST:
        raise ConfigError(
            f"--enable-share-memory knows megatron.core {'.'.join(map(str, OLDEST))} to "
            f"{'.'.join(map(str, NEWEST))}, this is {version}"
        )


def _returned(function: Callable[..., Any], version: str) -> tuple[tuple[str, ...], bool]:
    """The keys of the dict that `function` returns, and whether it returns a pair."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError) as error:
        raise ConfigError(f"megatron.core {version}: the source of {NAME} cannot be read ({error})") from error
    nodes = list(ast.walk(tree))
    dicts = {
        node.lineno: tuple(key.value for key in node.value.keys if isinstance(key, ast.Constant))
        for node in nodes
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict) and _assigns(node, "batch")
    }
    # The last one is the receiving ranks'; the sending rank may add keys of its own.
    keys = tuple(map(str, dicts[max(dicts)])) if dicts else ()
    if "tokens" not in keys or not set(keys) <= KNOWN_KEYS:
        raise ConfigError(f"megatron.core {version}: {NAME} returns {keys or 'no dict'}, which is not known here")
    returns_pair = any(
        isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple) and len(node.value.elts) == 2
        for node in nodes
    )
    return keys, returns_pair


def _assigns(node: ast.Assign, name: str) -> bool:
    return len(node.targets) == 1 and isinstance(node.targets[0], ast.Name) and node.targets[0].id == name
