"""The `--kv-manager` and `--kvdrive-*` flags, as a subclass of SGLang's sealed `ServerArgs` record.

The class must be importable by name: SGLang pickles the record into every child process, which imports this module to
rebuild it. Flags keep what the user typed; `config_from_server_args` turns them into a checked `KVDriveConfig`.
"""

# No `from __future__ import annotations`: SGLang reads the real types of these fields to build its parser.
import sys

import sglang.srt.plugins as stock_plugins
import sglang.srt.server_args as stock
from sglang.srt.arg_groups.arg_utils import A, Arg

from sglang_kvdrive.adapter import selfcheck
from sglang_kvdrive.config import DEFAULT_PRESET, EVICTIONS, PRESETS, KVDriveConfig, config_from_flags
from sglang_kvdrive.errors import ConfigError

NAMESPACE = "memory"
KVDRIVE = "kvdrive"


def _whole(text: str):
    """An int where the text is one; anything else stays text, so that our own check can name it with all other faults."""
    try:
        return int(text)
    except ValueError:
        return text


def _number(text: str):
    try:
        return float(text)
    except ValueError:
        return text


class KVDriveServerArgs(stock.ServerArgs, dict=True):
    """SGLang's `ServerArgs` with our fields. `dict=True` keeps its room for bookkeeping attributes."""

    kv_manager: A[
        str | None,
        Arg(
            help="Who manages the KV cache: native (SGLang) or kvdrive (index and windows in HBM, whole cache in DRAM, "
            "sparse attention on decode). Default: native.",
            choices=["native", KVDRIVE],
        ),
    ] = None
    kvdrive_hbm: A[str, Arg(help="Size of kvdrive's HBM arena such as 512MiB or 2GiB, or auto.")] = "auto"
    kvdrive_dram: A[str, Arg(help="Size of kvdrive's DRAM home of the whole KV cache such as 64GiB, or auto.")] = "auto"
    kvdrive_preset: A[str, Arg(help=f"Bundle of budget and chunk size: {', '.join(PRESETS)}. Flags given beside it win.")] = (
        DEFAULT_PRESET
    )
    kvdrive_budget: A[
        str | None,
        Arg(
            help="What a decode step attends per layer and KV head: a share such as 6.25%% or a number such as 2048tok. "
            "Sink, local and pending tokens come on top. Default: from the preset."
        ),
    ] = None
    kvdrive_budget_floor: A[
        int | None, Arg(help="A share never falls below this many tokens. Default: 512.", type_parser=_whole)
    ] = None
    kvdrive_dense_below: A[
        str, Arg(help="Up to this many tokens, prompt and generation, a request attends every token; or auto.")
    ] = "auto"
    kvdrive_chunk_size: A[
        int | None, Arg(help="Tokens per chunk: 1, 2, 4 or 8. Default: from the preset.", type_parser=_whole)
    ] = None
    kvdrive_window: A[float, Arg(help="Chunks kept in HBM, in multiples of the budget: 1 to 64.", type_parser=_number)] = 2.0
    kvdrive_eviction: A[str, Arg(help=f"Which chunk leaves a full window: {', '.join(EVICTIONS)}.")] = EVICTIONS[0]
    kvdrive_sink_tokens: A[int, Arg(help="First tokens, always attended: 0 to 1024.", type_parser=_whole)] = 4
    kvdrive_local_tokens: A[int, Arg(help="Most recent tokens, always attended: 1 to 8192.", type_parser=_whole)] = 64
    kvdrive_log_interval: A[
        float, Arg(help="Seconds between kvdrive's INFO lines with statistics; 0 turns them off.", type_parser=_number)
    ] = 30.0

    @classmethod
    def from_cli_args(cls, args):
        record = super().from_cli_args(args)
        record._kvdrive_from_cli = True
        return record

    def resolve_once(self) -> None:
        """SGLang's resolution between our checks. Stops here, before any process is started, when kvdrive cannot serve.

        Raises:
            ConfigError: with every reason, when the record came from `Engine(...)`.
            SystemExit: 2, after printing the reasons, when it came from a command line.
        """
        if getattr(self, "_resolution_finished", False):
            _stop_where_plugin_is_missing(self)
            return
        try:
            selfcheck.raise_all(early_faults(self))
            super().resolve_once()
            if self.kv_manager == KVDRIVE:
                selfcheck.raise_all(selfcheck.settings_that_did_not_hold(self))
        except ConfigError as error:
            if not getattr(self, "_kvdrive_from_cli", False):
                raise
            print("kvdrive cannot start:", *(f"- {reason}" for reason in error.reasons), sep="\n", file=sys.stderr, flush=True)
            raise SystemExit(2) from None


OUR_FIELDS = tuple(name for name in KVDriveServerArgs.__struct_fields__ if name not in stock.ServerArgs.__struct_fields__)
KVDriveServerArgs._NS_BY_FIELD = {**stock.ServerArgs._NS_BY_FIELD, **dict.fromkeys(OUR_FIELDS, NAMESPACE)}

_DEFAULTS = dict(zip(KVDriveServerArgs.__struct_fields__[::-1], KVDriveServerArgs.__struct_defaults__[::-1], strict=False))
_WHOLE_FIELDS = ("kvdrive_budget_floor", "kvdrive_chunk_size", "kvdrive_sink_tokens", "kvdrive_local_tokens")
_NUMBER_FIELDS = ("kvdrive_window", "kvdrive_log_interval")
_CONFIG_ARGUMENTS = {name: name.removeprefix("kvdrive_") for name in OUR_FIELDS if name != "kv_manager"}
del _CONFIG_ARGUMENTS["kvdrive_log_interval"]


def flag_of(field: str) -> str:
    return "--" + field.replace("_", "-")


def config_from_server_args(source) -> KVDriveConfig:
    """The engine's config from the flags: of the record, of a resolving view, or of the published `get_memory()` bag.

    Raises:
        ConfigError: with the faults of every flag at once.
    """
    reasons: list[str] = []
    values = {name: getattr(source, name) for name in OUR_FIELDS if name != "kv_manager"}
    for name, kind, wanted in (
        *((name, int, "a whole number") for name in _WHOLE_FIELDS),
        *((name, (int, float), "a number") for name in _NUMBER_FIELDS),
    ):
        value = values[name]
        if value != _DEFAULTS[name] and (isinstance(value, bool) or not isinstance(value, kind)):
            reasons.append(f"{flag_of(name)} is {value!r}, it must be {wanted}")
            values[name] = _DEFAULTS[name]
    if not 0 <= values["kvdrive_log_interval"] < float("inf"):
        reasons.append(
            f"--kvdrive-log-interval is {values['kvdrive_log_interval']:g}, it must be a number of seconds from 0 (off) up"
        )
    for name in ("kvdrive_hbm", "kvdrive_dram", "kvdrive_budget", "kvdrive_dense_below"):
        if values[name] is not None:
            values[name] = str(values[name])  # Engine(...) callers may pass numbers: refused by unit, not by a TypeError
    config = None
    try:
        config = config_from_flags(**{argument: values[name] for name, argument in _CONFIG_ARGUMENTS.items()})
    except ConfigError as error:
        reasons += error.reasons
    selfcheck.raise_all(reasons)
    return config


def early_faults(server_args) -> list[str]:
    """Everything that can be told before SGLang resolves anything, and, if the start fails anyway, the model's faults too."""
    if server_args.kv_manager not in (None, "native", KVDRIVE):
        return [f"kv_manager is {server_args.kv_manager!r}, it must be native or kvdrive"]
    if server_args.kv_manager != KVDRIVE:
        given = [name for name in OUR_FIELDS if name != "kv_manager" and getattr(server_args, name) != _DEFAULTS[name]]
        given += [name for name in ("attention_backend", "radix_cache_backend") if getattr(server_args, name) == KVDRIVE]
        return [f"{flag_of(name)} has no effect without --kv-manager kvdrive: add that or remove the flag" for name in given]
    reasons = selfcheck.plugin_faults()
    try:
        config_from_server_args(server_args)
    except ConfigError as error:
        reasons += error.reasons
    reasons += selfcheck.refused_settings(server_args)
    return reasons + selfcheck.refused_local_model(server_args) if reasons else []


def _stop_where_plugin_is_missing(server_args) -> None:
    """In a child process the record arrives resolved. If plugins were loaded there without ours, serving would be native."""
    if server_args.kv_manager == KVDRIVE and stock_plugins._plugins_loaded:
        selfcheck.raise_all(selfcheck.plugin_faults())
