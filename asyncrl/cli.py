"""The `asyncrl` command. Imports nothing heavy before a configuration is known to be right."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from asyncrl.config import load_config
from asyncrl.errors import AsyncRLError, ConfigError, DataError, last_line

INTERRUPTED = 130
TERMINATED = 128 + signal.SIGTERM

HELP = """Post-train a language model with reinforcement learning, asynchronously.

Start with `asyncrl check my.yaml`, then `asyncrl train my.yaml learner.lr=5e-6`: any key can be overridden.

Exit codes: 0 done, 1 failed, 2 configuration or data are wrong, 130 interrupted, 143 terminated.

Documentation: README.md and docs/ of the repository, every key in docs/configuration.md (`asyncrl schema --markdown`).
"""

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=HELP)

ConfigPath = Annotated[  # not a Path: an override may stand there, and a Path turns a=x//y into a=x/y
    str | None, typer.Argument(metavar="CONFIG", help="YAML file; left out: all defaults.")
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume", help="Go on from the newest checkpoint of the run directory that run.name names."
    ),
]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Dotted overrides.")]


def split_arguments(config: str | None, overrides: list[str] | None) -> tuple[Path | None, list[str]]:
    """The config file may be left out: then the first word is an override already."""
    words = list(overrides or [])
    if config is not None and "=" in config and not os.path.isfile(config):
        return None, [config, *words]
    return Path(config) if config is not None else None, words


@app.command()
def train(config: ConfigPath = None, overrides: Overrides = None, resume: Resume = False) -> None:
    """Start everything on this node: coordinator, learner ranks, rollout servers."""
    from asyncrl.launch.run import run_until_done

    path = run_until_done(load_config(*split_arguments(config, overrides)), resume=resume)
    print(f"done: {path}")


@app.command()
def learner(config: ConfigPath = None, overrides: Overrides = None, resume: Resume = False) -> None:
    """Start coordinator and learner ranks; rollout servers connect by themselves."""
    resolved = load_config(*split_arguments(config, overrides))
    if "TORCHELASTIC_RUN_ID" in os.environ:  # set by torchrun: this process is one rank of several
        from asyncrl.launch.torchrun import run_as_torchrun_rank

        run_as_torchrun_rank(resolved, resume=resume)
        return
    from asyncrl.launch.run import run_until_done

    print(f"done: {run_until_done(resolved, start=('learner',), resume=resume)}")


@app.command("rollout-server")
def rollout_server(
    connect: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where the coordinator listens.")],
    config: ConfigPath = None,
    overrides: Overrides = None,
) -> None:
    """Start one rollout server and connect it to a running learner."""
    from asyncrl.launch.standalone import run_standalone_server

    run_standalone_server(load_config(*split_arguments(config, overrides)), connect)


@app.command("eval")
def evaluate(
    config: ConfigPath = None,
    overrides: Overrides = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Hugging Face folder, or a run directory, instead of the config's model."
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where the numbers go as JSON; left out: stdout.")
    ] = None,
) -> None:
    """Evaluate a model on data.eval: one engine, no learner. Numbers as a table, and as JSON."""
    import json

    from asyncrl.launch.evaluate import evaluate_model, print_table

    loaded = load_config(*split_arguments(config, overrides))
    if output is not None:
        _check_output(output)
    folder = _model_of(checkpoint) if checkpoint is not None else None
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8") as stdout:
        os.dup2(
            sys.stderr.fileno(), sys.stdout.fileno()
        )  # user code prints too; stdout is for the JSON alone
        result = evaluate_model(loaded, folder)
        print_table(result)
        text = json.dumps(result.as_json(), indent=2) + "\n"
        if output is None:
            stdout.write(text)
        else:
            output.write_text(text, encoding="utf-8")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # everything has ended; vLLM taken apart object by object prints errors of its own


def _model_of(checkpoint: Path) -> Path:
    """The model's folder: of a run, or as it was given. Raises ConfigError."""
    from asyncrl.export import find_source

    try:
        return find_source(checkpoint).model.resolve()
    except ConfigError as error:
        raise ConfigError(f"--checkpoint: {error}") from None


def _check_output(output: Path) -> None:
    """Raises ConfigError for a file that cannot be written, before the work is done that it is for."""
    if output.is_dir() or not os.access(output if output.exists() else output.parent, os.W_OK):
        raise ConfigError(f"--output: {output} cannot be written; name a file in an existing folder")


@app.command()
def check(
    config: ConfigPath = None,
    overrides: Overrides = None,
    resolved: Annotated[bool, typer.Option(help="Print the whole resolved configuration too.")] = False,
) -> None:
    """Resolve the configuration, print every derived number, start nothing."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from asyncrl.check import check as derive
    from asyncrl.config import dump_config

    loaded = load_config(*split_arguments(config, overrides))
    table = Table.grid(padding=(0, 2))
    for what, value in derive(loaded):
        table.add_row(what, Text(value))  # not markup: a file may be called part[a].jsonl
    if resolved:
        print(dump_config(loaded))
    Console().print(table)


@app.command()
def data(
    config: ConfigPath = None,
    overrides: Overrides = None,
    rows: Annotated[int, typer.Option(min=0, help="Rows of each source that are shown whole.")] = 3,
) -> None:
    """Print what became of each source's rows, prompt lengths, and the first prompts as the model sees them."""
    from asyncrl.envs.dataset import load_rows, load_tokenizer, tokenize
    from asyncrl.envs.inspect_data import describe, describe_supervised
    from asyncrl.envs.supervised import SUPERVISED_KEY, load_supervised
    from asyncrl.launch.preflight import load_eval_rows
    from asyncrl.models.source import model_is_ready, resolve_model

    loaded = load_config(*split_arguments(config, overrides))
    if not model_is_ready(loaded.model):
        raise ConfigError(
            f"model: {loaded.model!r} is not here yet, and its tokenizer makes the tokens; bring it with "
            f"python -m asyncrl.models {loaded.model}"
        )
    tokenizer = load_tokenizer(resolve_model(loaded.model))
    train_rows = load_rows(loaded.data.train, loaded.data, loaded.seed)
    for key, sources in (("data.train", train_rows), ("data.eval", load_eval_rows(loaded))):
        if sources:
            shown = describe(tokenize(sources, loaded.data, tokenizer), loaded.data, tokenizer, rows)
            print(key, *shown, sep="\n")
    if loaded.data.supervised:
        supervised = load_supervised(loaded, tokenizer)
        print(SUPERVISED_KEY, *describe_supervised(supervised, loaded, tokenizer, rows), sep="\n")


@app.command()
def export(
    source: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory, or a model's folder.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to make.")],
    dtype: Annotated[
        str | None, typer.Option(help="bfloat16 or float32; left out: the weights as they are stored.")
    ] = None,
) -> None:
    """Write a trained model, its tokenizer and a model card in Hugging Face format."""
    from asyncrl.export import export_folder

    tensors = export_folder(source, out, dtype)
    dtypes = " and ".join(sorted({tensor.dtype for tensor in tensors}))
    num_bytes = sum(tensor.num_bytes for tensor in tensors)
    print(f"exported {len(tensors)} tensors, {num_bytes / 1e6:.1f} MB of {dtypes}, to {out}")
    print(f"its card is {out / 'README.md'}; transformers' from_pretrained and `vllm serve {out}` load it")


@app.command()
def schema(
    markdown: Annotated[bool, typer.Option("--markdown", help="As the page docs/configuration.md.")] = False,
) -> None:
    """Print every key of the configuration, its type, default and meaning: as JSON schema, for editors."""
    import json

    from asyncrl.config import Config
    from asyncrl.config.reference import reference

    if markdown:
        print(reference(), end="")
        return
    print(json.dumps(Config.model_json_schema(), indent=2))


def main() -> None:
    """Entry point of the `asyncrl` script."""
    sys.exit(_exit_code(app))


def _exit_code(command: Callable[[], None]) -> int:
    try:
        command()
    except (ConfigError, DataError) as error:
        print(f"asyncrl: {error}", file=sys.stderr)
        return 2
    except AsyncRLError as error:
        print(*str(error).splitlines()[:-1], f"asyncrl: {last_line(error)}", sep="\n", file=sys.stderr)
        return 1
    except SystemExit as ended:
        # INTERRUPTED is what Typer makes of KeyboardInterrupt.
        words = {INTERRUPTED: "interrupted", TERMINATED: "terminated"}
        if ended.code not in words:
            raise
        print(f"asyncrl: {words[ended.code]}; everything it started has ended", file=sys.stderr)
        return ended.code
    return 0


if __name__ == "__main__":
    main()
