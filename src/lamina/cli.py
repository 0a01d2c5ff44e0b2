"""The ``lamina`` command: one function a command, which only hands its options on and prints what comes back."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from lamina import __version__
from lamina.errors import ConfigError, LaminaError

FAILURE = 2
"""Exit code of every mistake that Lamina can name."""


class Commands(TyperGroup):
    """Turns a LaminaError into one red paragraph on stderr; any other error keeps its traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except LaminaError as error:
            from lamina.app.screen import Screen

            Screen().remark("Error: " + " ".join(str(error).split()), "red")
            raise typer.Exit(FAILURE) from None


app = typer.Typer(
    cls=Commands,
    help="A KV cache for transformer inference whose precision is decided while the model runs.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Model = Annotated[str, typer.Argument(metavar="MODEL", help="Model folder, or name on the Hugging Face hub.")]
NamedModel = Annotated[str, typer.Option(help="Model folder, or name on the Hugging Face hub.")]
HeldOutText = Annotated[
    str, typer.Option(help="Text or JSONL file, data set, or `default`: what calibration leaves out of it.")
]
AllTokens = Annotated[int, typer.Option(min=2, help="Tokens in all, rounded down to whole sequences.")]
ProfileFile = Annotated[Path, typer.Option("--profile", help="Profile made by `lamina calibrate` or `lamina tune`.")]
Field = Annotated[str | None, typer.Option(help="Field of JSON or data set records; a+b joins several.")]
Dtype = Annotated[str, typer.Option(help="auto (float32 on the CPU), float32, bfloat16 or float16.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Seed = Annotated[int, typer.Option(help="Seed of every random choice.")]
Sink = Annotated[int, typer.Option(help="First tokens that stay exact; a multiple of 64.")]
Recent = Annotated[int, typer.Option(help="Most recent tokens that stay exact; a multiple of 64.")]
Json = Annotated[bool, typer.Option("--json", help="Write one JSON document to stdout, and nothing else.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lamina {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of every command."""


@app.command()
def calibrate(
    model: Model,
    output: Annotated[Path, typer.Option("-o", "--output", help="Where the profile is written.")],
    data: Annotated[
        list[str] | None,
        typer.Option(help="Text or JSONL file, Hugging Face data set, or `default`; give several to mix them evenly."),
    ] = None,
    field: Field = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to calibrate on, rounded up to whole sequences.")] = 40_000,
    seq_len: Annotated[int, typer.Option(min=2, help="Tokens in a sequence.")] = 2048,
    max_context: Annotated[
        int | None, typer.Option(min=1, help="Largest position to cover; the model's, at most 131072, unless told.")
    ] = None,
    seed: Seed = 0,
    transform: Annotated[str, typer.Option(help="balanced, oscar, hadamard or identity.")] = "balanced",
    tier: Annotated[str, typer.Option(help="Bits to start with: 2, 4, 8, or K and V apart, such as k4v2.")] = "2",
    dtype: Dtype = "auto",
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Learn a model's profile from text, in one pass."""
    from lamina.app.calibrate import CalibrationRequest, run_calibration
    from lamina.app.screen import Screen
    from lamina.app.tables import calibration_table

    screen = Screen()
    request = CalibrationRequest(
        model=model,
        output=output,
        data=data or ["default"],
        field=field,
        tokens=tokens,
        seq_len=seq_len,
        max_context=max_context,
        seed=seed,
        transform=transform,
        tier=tier,
        dtype=dtype,
        device=device,
    )
    report = run_calibration(request, screen)
    screen.publish(report.as_json(), json, calibration_table(report))


@app.command()
def tune(
    model: Model,
    profile: ProfileFile,
    output: Annotated[Path, typer.Option("-o", "--output", help="Where the tuned profile is written.")],
    max_kl: Annotated[
        float | None, typer.Option(help="Goal: mean KL of the next token to stay within, in nats, such as 0.01.")
    ] = None,
    target_bits: Annotated[float | None, typer.Option(help="Goal: average bits to spend, 2 to 8.")] = None,
    policy: Annotated[str, typer.Option(help="With --max-kl: threshold, hysteresis or vote.")] = "threshold",
    data: Annotated[
        list[str] | None,
        typer.Option(help="Text to tune on, not that of the calibration; the KL is kept on each of several."),
    ] = None,
    field: Field = None,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens in all, at least one sequence of each text.")] = 2048,
    seq_len: Annotated[int, typer.Option(min=2, help="Tokens in a sequence.")] = 1024,
    remeasure: Annotated[
        bool, typer.Option("--remeasure", help="Measure the layers' weights even if the profile has some.")
    ] = False,
    sink: Sink = 64,
    recent: Recent = 256,
    dtype: Dtype = "auto",
    device: Device = "auto",
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Find controller settings that meet a goal, and write them into a profile."""
    from lamina.app.screen import Screen
    from lamina.app.tables import tuning_table
    from lamina.app.tune import TuneRequest, run_tuning

    screen = Screen()
    request = TuneRequest(
        model=model,
        profile=profile,
        output=output,
        max_kl=max_kl,
        target_bits=target_bits,
        policy=policy,
        data=tuple(data or ["default"]),
        field=field,
        tokens=tokens,
        seq_len=seq_len,
        remeasure=remeasure,
        sink=sink,
        recent=recent,
        dtype=dtype,
        device=device,
        seed=seed,
    )
    report = run_tuning(request, screen)
    screen.publish(report.as_json(), json, tuning_table(report))


@app.command()
def generate(
    model: Model,
    profile: ProfileFile,
    prompt: Annotated[str | None, typer.Option(help="The prompt; standard input is read without one.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="File that holds the prompt.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to write at most.")] = 256,
    tier: Annotated[str | None, typer.Option(help="2, 4, 8 or a pair such as k4v2; the profile's unless told.")] = None,
    sink: Sink = 64,
    recent: Recent = 256,
    max_bytes: Annotated[
        str | None, typer.Option(help="Bound on the cache, such as 512M or 2G; planes, then exact rows are shed.")
    ] = None,
    live: Annotated[
        bool | None,
        typer.Option("--live/--fixed", help="Decide tiers while running; if the profile is tuned, unless told."),
    ] = None,
    target_bits: Annotated[float | None, typer.Option(help="Live, with so many bits on average, 2 to 8.")] = None,
    trace: Annotated[Path | None, typer.Option(help="JSONL file for what the cache decides, closes and drops.")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Show tiers, bits and bytes while the text comes.")] = False,
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Share of the probability to sample from.")] = 1.0,
    seed: Seed = 0,
    chat: Annotated[
        bool | None, typer.Option("--chat/--no-chat", help="Use the chat template; if there is one, unless told.")
    ] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Write a text with a packed cache, and say what the cache took."""
    from lamina.app.generate import GenerationRequest, Sampling, run_generation
    from lamina.app.screen import Screen

    screen = Screen()
    request = GenerationRequest(
        model=model,
        profile=profile,
        prompt=prompt,
        prompt_file=prompt_file,
        max_new_tokens=max_new_tokens,
        tier=tier,
        sink=sink,
        recent=recent,
        max_bytes=max_bytes,
        live=live,
        target_bits=target_bits,
        trace=trace,
        watch=watch,
        sampling=Sampling(temperature, top_p, seed),
        chat=chat,
        dtype=dtype,
        device=device,
    )
    report = run_generation(request, screen, stream=not json)
    if json:
        screen.json(report.as_json())
    else:
        screen.remark(report.summary(), "dim")


@app.command()
def evaluate(
    model: NamedModel,
    profile: ProfileFile,
    tasks: Annotated[
        str,
        typer.Option(
            help="Tasks with commas: multi-key, multi-value, variable-tracking, aggregation with :TOKENS, the first "
            "two also with :DISTRACTORS; answers, humaneval with :FILE."
        ),
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Folder of answers and summary; a run that stopped goes on there.")
    ],
    arms: Annotated[
        str, typer.Option(help="Ways of keeping the cache, with commas; a wrong name lists them all.")
    ] = "bf16,lamina-int2,lamina-k4v2",
    n: Annotated[int, typer.Option("--n", min=1, help="Prompts of each task and seed.")] = 20,
    seeds: Annotated[int, typer.Option(min=1, help="Draws of prompts, numbered from 0.")] = 3,
    protocol: Annotated[
        str, typer.Option(help="frozen: controllers warm up on other prompts, then stay; live: they go on throughout.")
    ] = "frozen",
    orders: Annotated[
        int, typer.Option(min=1, help="With --protocol live: orders of the same prompts, for the spread over them.")
    ] = 1,
    warm_up: Annotated[int, typer.Option(min=1, help="With --protocol frozen: prompts of each seed's warm-up.")] = 16,
    chat: Annotated[bool, typer.Option("--chat", help="Ask in the tokenizer's chat template.")] = False,
    sink: Sink = 64,
    recent: Recent = 256,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Answer tasks with each arm and say whether they differ; can be interrupted."""
    from lamina.app.evaluate import EvaluationRequest, run_evaluation
    from lamina.app.screen import Screen

    screen = Screen()
    request = EvaluationRequest(
        model, profile, arms, tasks, output, n, seeds, protocol, orders, warm_up, chat, sink, recent, dtype, device
    )  # fmt: skip
    report = run_evaluation(request, screen)
    screen.show(report.markdown)
    screen.remark(f"{report.summary}, {report.table} and {report.log} hold all of it")


@app.command()
def protocol(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="TOML file with the parts: fidelity and evaluate.")],
    model: NamedModel,
    profile: ProfileFile,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Folder of all results; a run that stopped goes on there.")
    ],
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Run all parts of a protocol and draw its report; can be interrupted."""
    from lamina.app.protocol_file import ProtocolRequest, run_protocol
    from lamina.app.screen import Screen

    screen = Screen()
    written = run_protocol(ProtocolRequest(file, model, profile, output, dtype, device), screen)
    screen.show(f"{written.page}: the page of {output}; {written.table}: its tables")


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of `lamina evaluate`, or of several.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="HTML file to write; report.html in DIR unless told.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Write one JSON document to stdout instead of a page.")] = False,
) -> None:
    """Draw what an evaluation found as a page, with a Markdown table beside it."""
    from lamina.app.evaluation_report import report_document, run_report
    from lamina.app.screen import Screen

    screen = Screen()
    if json:
        if output is not None:
            raise ConfigError("--json writes no page; leave out -o or --json")
        screen.json(report_document(folder))
    else:
        written = run_report(folder, output)
        screen.show(f"{written.page}: the page of {folder}; {written.table}: its tables")


@app.command()
def fidelity(
    model: NamedModel,
    profile: ProfileFile,
    arms: Annotated[
        str, typer.Option(help="Ways of keeping the cache, with commas; a wrong name lists them all.")
    ] = "bf16,naive-int2,oscar-int2,lamina-int2,lamina-k4v2,lamina-int4",
    text: HeldOutText = "default",
    field: Field = None,
    seq_len: Annotated[int, typer.Option(min=2, help="Tokens in a sequence.")] = 2048,
    max_tokens: AllTokens = 4096,
    position_offset: Annotated[
        str, typer.Option(help="Position of each sequence's first token; 30% is of the model's maximum.")
    ] = "0",
    sink: Sink = 64,
    recent: Recent = 256,
    dtype: Dtype = "auto",
    device: Device = "auto",
    seed: Seed = 0,
    layers: Annotated[bool, typer.Option("--layers/--no-layers", help="Also measure KL by layer, for --json.")] = True,
    json: Annotated[str | None, typer.Option(metavar="OUT", help="JSON file to write; - is stdout.")] = None,
) -> None:
    """Measure how far each arm's next-token distributions are from the exact run's."""
    from lamina.app.fidelity import FidelityRequest, run_fidelity
    from lamina.app.screen import Screen
    from lamina.app.tables import fidelity_table

    screen = Screen()
    request = FidelityRequest(
        model=model,
        profile=profile,
        arms=arms,
        text=text,
        field=field,
        seq_len=seq_len,
        max_tokens=max_tokens,
        position_offset=position_offset,
        sink=sink,
        recent=recent,
        dtype=dtype,
        device=device,
        seed=seed,
        layers=layers,
    )
    report = run_fidelity(request, screen)
    screen.publish(report.as_json(), json, fidelity_table(report))


@app.command()
def ablate(
    model: NamedModel,
    profile: ProfileFile,
    text: HeldOutText = "default",
    study: Annotated[
        list[str] | None, typer.Option(help="What to vary; may be repeated. All unless told; a wrong name lists them.")
    ] = None,
    other_profile: Annotated[
        list[Path] | None, typer.Option(help="Another calibration, for the study `calibration`; may be repeated.")
    ] = None,
    field: Field = None,
    tokens: AllTokens = 2048,
    seq_len: Annotated[int, typer.Option(min=2, help="Tokens in a sequence, at most all.")] = 2048,
    sink: Sink = 64,
    recent: Recent = 256,
    dtype: Dtype = "auto",
    device: Device = "auto",
    seed: Seed = 0,
    csv: Annotated[Path | None, typer.Option(help="CSV file, one row an arm; grows study by study.")] = None,
    json: Json = False,
) -> None:
    """Vary one thing at a time, from rotation to scales, and say what it does to the next token."""
    from lamina.app.ablate import AblationRequest, run_ablation
    from lamina.app.ablate_tables import ablation_tables
    from lamina.app.screen import Screen

    screen = Screen()
    request = AblationRequest(
        model, profile, text, field, tokens, seq_len, sink, recent, dtype, device, seed, csv,
        studies=tuple(study or ()), others=tuple(other_profile or ()),
    )  # fmt: skip
    report = run_ablation(request, screen)
    screen.publish(report.as_json(), json, *ablation_tables(report))


@app.command()
def stages(
    model: NamedModel,
    profile: ProfileFile,
    arms: Annotated[
        str, typer.Option(help="Ways of keeping the cache, with commas; a wrong name lists them all.")
    ] = "naive-int2,hadamard-int2,oscar-int2,lamina-int2,lamina-k4v2,lamina-int4",
    text: HeldOutText = "default",
    field: Field = None,
    tokens: AllTokens = 2048,
    seq_len: Annotated[int, typer.Option(min=2, help="Tokens in a sequence, at most all.")] = 2048,
    sink: Sink = 64,
    recent: Recent = 256,
    dtype: Dtype = "auto",
    device: Device = "auto",
    seed: Seed = 0,
    csv: Annotated[Path | None, typer.Option(help="CSV file to write, one row a layer of an arm.")] = None,
    json: Json = False,
) -> None:
    """Say how large the error is in cache, logits, attention output and hidden state of each layer."""
    from lamina.app.ablate import StagesRequest, run_stages
    from lamina.app.ablate_tables import stages_tables
    from lamina.app.screen import Screen

    screen = Screen()
    request = StagesRequest(
        model, profile, text, field, tokens, seq_len, sink, recent, dtype, device, seed, csv, arms=arms
    )  # fmt: skip
    report = run_stages(request, screen)
    screen.publish(report.as_json(), json, *stages_tables(report))


@app.command()
def plan(
    model: Model,
    memory: Annotated[str, typer.Option(help="Memory for weights and caches: 24G, 512M (powers of 1024), 24GB.")],
    context: Annotated[int | None, typer.Option(min=1, help="Tokens a request; else the model's maximum.")] = None,
    tier: Annotated[
        list[str] | None,
        typer.Option(help="2, 4, 8 or a pair such as k4v2; may be repeated. All four unless told."),
    ] = None,
    profile: Annotated[Path | None, typer.Option(help="Also plan with this profile's own tiers.")] = None,
    dtype: Annotated[str, typer.Option(help="Of weights and exact rows: bfloat16, float16 or float32.")] = "bfloat16",
    max_batch: Annotated[int, typer.Option(min=1, help="Requests that share the memory in `longest request`.")] = 1,
    reserve: Annotated[float, typer.Option(help="Percent of the memory kept for activations and the rest.")] = 10.0,
    sink: Sink = 64,
    recent: Recent = 256,
    engine: Annotated[str, typer.Option(help="Whose pools: transformers or vllm.")] = "transformers",
    batched_tokens: Annotated[int, typer.Option(min=1, help="vLLM's --max-num-batched-tokens.")] = 8192,
    json: Json = False,
) -> None:
    """Say how many tokens and requests fit into a memory, from the model's configuration alone."""
    from lamina.app.plan import DEFAULT_TIERS, PlanRequest, make_plan
    from lamina.app.screen import Screen
    from lamina.app.tables import plan_table

    screen = Screen()
    request = PlanRequest(
        model=model,
        memory=memory,
        context=context,
        tiers=tier or DEFAULT_TIERS,
        profile=profile,
        dtype=dtype,
        max_batch=max_batch,
        reserve=reserve,
        sink=sink,
        recent=recent,
        engine=engine,
        batched_tokens=batched_tokens,
    )
    found = make_plan(request, screen)
    screen.publish(found.as_json(), json, plan_table(found), *found.notes)


@app.command()
def doctor(json: Json = False) -> None:
    """Say what works on this machine, what does not, and what to do about it."""
    from lamina.app.doctor import examine, is_usable
    from lamina.app.screen import Screen
    from lamina.app.tables import doctor_table

    screen = Screen()
    with screen.working("Looking around"):
        checks = examine()
    screen.publish([check.as_json() for check in checks], json, doctor_table(checks))
    raise typer.Exit(0 if is_usable(checks) else 1)


@app.command()
def inspect(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="Profile made by `lamina calibrate` or `lamina tune`, or a saved cache."),
    ],
    json: Json = False,
) -> None:
    """Say what is in a profile or a saved cache; no model is needed."""
    from lamina.app.inspect_tables import inspection_tables
    from lamina.app.inspection import inspect_file
    from lamina.app.screen import Screen

    found = inspect_file(file)
    Screen().publish(found.as_json(), json, *inspection_tables(found))


@app.command()
def trace(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Trace written by `lamina generate --trace`.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="HTML file to write; FILE with .html unless told.")
    ] = None,
    layers: Annotated[
        str | None, typer.Option(help="Layers whose pages are drawn, such as 0,7,29; three are chosen unless told.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Write a summary to stdout instead of a page.")] = False,
) -> None:
    """Draw what a cache decided, wrote and dropped as a page."""
    from lamina.app.screen import Screen
    from lamina.app.trace import TraceRequest, run_trace, summarise_trace

    screen = Screen()
    if json:
        if output is not None or layers is not None:
            raise ConfigError("--json writes no page; leave out -o and --layers, or --json")
        screen.json(summarise_trace(file))
    else:
        written = run_trace(TraceRequest(file, output, layers))
        screen.show(f"{written}: the page of {file}")


@app.command("import-rotations")
def import_rotations(
    model: Model,
    k: Annotated[Path, typer.Option(help="RotationZoo file of the keys.")],
    v: Annotated[Path, typer.Option(help="RotationZoo file of the values.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Where the profile is written.")],
) -> None:
    """Make a profile of a pair of OSCAR rotation files."""
    from lamina.app.rotations import import_rotations as run
    from lamina.app.screen import Screen

    screen = Screen()
    profile = run(model, k, v, output, screen)
    screen.show(f"{output}: rotations of {len(profile.layers)} layers for {model}")


@app.command("export-rotations")
def export_rotations(
    profile: ProfileFile,
    k: Annotated[Path, typer.Option(help="RotationZoo file to write for the keys.")],
    v: Annotated[Path, typer.Option(help="RotationZoo file to write for the values.")],
    per_head: Annotated[bool, typer.Option("--per-head/--shared", help="A basis a KV head, or one a layer.")] = True,
) -> None:
    """Write a profile's OSCAR bases as a pair of rotation files."""
    from lamina.app.rotations import export_rotations as run
    from lamina.app.screen import Screen

    done = run(profile, k, v, per_head=per_head)
    Screen().show(f"{k}, {v}: {done.transform} rotations of {len(done.layers)} layers")


@app.command()
def demo(
    model: Annotated[str | None, typer.Option(help="Model to show; a small one is fetched unless told.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="Long prompt; one is built in.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens to write; 400, or 96 with --quick.")] = None,
    data: Annotated[
        list[str] | None, typer.Option(help="Text to calibrate and, with other documents of it, to measure on.")
    ] = None,
    field: Field = None,
    quick: Annotated[bool, typer.Option("--quick", help="Less text everywhere: a few minutes.")] = False,
    report: Annotated[Path, typer.Option(help="HTML file for the figures and their pictures.")] = Path(
        "lamina-demo.html"
    ),
) -> None:
    """Calibrate a small model, write a long answer at 2 bits, and compare the ways of keeping its cache."""
    from lamina.app.demo import DemoRequest, run_demo
    from lamina.app.screen import Screen

    run_demo(
        DemoRequest(model, prompt_file, max_new_tokens, tuple(data or ["default"]), field, quick, report), Screen()
    )


def main() -> None:
    """Entry point of the ``lamina`` command.

    torch and numba each have a pool of OpenMP threads. Unless told otherwise, threads that wait give their core back:
    where they spin, the two pools hold each other up as soon as anything else runs on the machine.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    app(prog_name="lamina")
