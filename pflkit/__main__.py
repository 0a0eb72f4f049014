"""The command line: python -m pflkit [run | evidence | claims | bench | list | data] ..."""

import re
import sys

import click
import yaml

from pflkit.methods import METHODS

data_root_option = click.option(
    "--data-root", help="Folder of the data sets.  [$PFLKIT_DATA, else a folder of the user's cache]"
)


def refuse(error):
    """Ends with one line for bad input."""
    click.echo(f"pflkit: {' '.join(str(error).split())}", err=True)
    sys.exit(2)


class Loader(yaml.SafeLoader):
    """YAML that takes 1e-3 for the number it is; YAML 1.1 asks for 1.0e-3."""


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def value_of(text):
    """The value that `text` stands for in YAML."""
    try:
        return yaml.load(text, Loader)
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{text!r}: must be a value in YAML: {error}") from None


@click.group(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--profile", default="small", show_default=True, help="smoke (seconds), small (minutes) or paper (GPU).")
@click.option("--only", multiple=True, help="Only the notebooks whose names start so, e.g. 02. May be repeated.")
@click.option("-p", "pairs", multiple=True, type=(str, str), metavar="NAME VALUE", help="A parameter of the notebooks.")
@click.option("-y", "blocks", multiple=True, metavar="YAML", help='Parameters as YAML, e.g. "{rounds: 5, seeds: 1}".')
@click.option("--write", is_flag=True, help="Rewrite the committed copies in figures/small, from fresh runs.")
@click.pass_context
def main(context, profile, only, pairs, blocks, write):
    """Runs all notebooks in order and leaves executed copies, figures and tables under figures/.

    Ends with 0 only if every notebook ran.
    """
    if context.invoked_subcommand is not None:
        return
    from pflkit.reproduce import reproduce

    try:
        parameters = {name: value_of(value) for name, value in pairs}
        for block in blocks:
            loaded = value_of(block)
            if not isinstance(loaded, dict) or not all(isinstance(name, str) for name in loaded):
                raise ValueError(f"-y {block!r}: must be a mapping of names to values")
            parameters |= loaded
        failed = reproduce(profile, only, parameters, write, say=click.echo)
    except (ValueError, OSError) as error:
        refuse(error)
    sys.exit(1 if failed else 0)


@main.command("list")
def list_methods():
    """Prints a line per method: its name, then its paper and year."""
    for name, method in METHODS.items():
        click.echo(f"{name:<10} {method.paper}")


@main.command("data")
@data_root_option
def list_data(data_root):
    """Prints a line per data set: what is found of it, where, and what to do about the rest."""
    from pflkit.inventory import FOUND

    try:
        for name, found in FOUND.items():
            click.echo(f"{name:<14} {found(data_root)}")
    except OSError as error:
        refuse(error)


@main.command("bench")
@click.option("--full", is_flag=True, help="All methods and more, with evaluation, scaling and memory; ten minutes.")
@click.option("--out", help="Folder of tables (CSV) and plots (PNG).  [none]")
def run_bench(full, out):
    """Times a round of training: our engines and a plain loop of torch modules, side by side, on the CPU."""
    from pflkit.bench import bench

    try:
        bench(full, out, say=click.echo)
    except OSError as error:
        refuse(error)


@main.command("evidence")
@click.argument("names", nargs=-1, metavar="[SET]...")
@click.option("--scale", default="reduced", show_default=True, help="reduced (hours on two cores) or paper (GPU).")
@click.option("--folder", default="figures/evidence", show_default=True, help="Where results are recorded.")
@click.option("--jobs", default=-1, show_default=True, help="Experiments at once; -1: one a core.")
@data_root_option
def run_evidence(names, scale, folder, jobs, data_root):
    """Runs what is missing of the papers' experiments whose names start with SET; without SET, lists them all."""
    from pflkit import protocols
    from pflkit.evidence import collect, missing

    try:
        sets = protocols.fedah(scale) | protocols.fedgh(scale) | protocols.fedapa(scale)
        if not names:
            for name, group in sets.items():
                there = len(group) - len(missing(f"{folder}/{name}", group))
                click.echo(f"{name:<36} {there} of {len(group)}")
            return
        for name in names:
            if not any(known.startswith(name) for known in sets):
                raise ValueError(f"{name}: starts the name of no set; `python -m pflkit evidence` lists them")
        chosen = {name: sets[name] for start in names for name in sets if name.startswith(start)}
        failed = collect(chosen, folder, jobs=jobs, data_root=data_root, say=click.echo)
    except (ValueError, OSError) as error:
        refuse(error)
    sys.exit(1 if failed else 0)


@main.command("claims")
@click.argument("ids", nargs=-1, metavar="[ID]...")
@click.option("--folder", default="figures/evidence", show_default=True, help="Where `evidence` recorded results.")
@click.option("--out", help="Folder for claims.csv, claims.md and claims-numbers.csv.  [none]")
def run_claims(ids, folder, out):
    """Checks the papers' claims, all or those with an ID, by recorded runs: verdicts, numbers and why."""
    from pflkit import tables
    from pflkit.claims import report

    try:
        found = report.report(folder, ids)
        if out:
            tables.save(report.table(found), f"{out}/claims", "The papers' claims, by the runs that are there")
            report.numbers(found).to_csv(f"{out}/claims-numbers.csv")
    except (ValueError, OSError) as error:
        refuse(error)
    for line in report.lines(found):
        click.echo(line)


@main.command()
@click.argument("method")
@click.option(
    "--dataset", default="digits", show_default=True, help="A name that `data` lists, or a FILE.npz of x and y."
)
@click.option("--length", type=int, help="Word numbers a text, of AG News; what is beyond is dropped.  [200]")
@click.option("--ngrams", type=int, help="2: pairs of words too, 3: triples too, of AG News.  [1]")
@click.option(
    "--model",
    help="cnn, cnn-small, cnn-1 to -5, lenet5, resnet18, mlp, mlp-1 to -5, fasttext; A+B: in turn.  [by the data]",
)
@click.option(
    "--partition", default="dirichlet", show_default=True, help="iid, pathological, dirichlet or classes_per_client."
)
@click.option("--beta", type=float, help="Dirichlet concentration.  [0.1]")
@click.option("--classes", type=int, help="Classes per client of the pathological partitions.  [2]")
@click.option("--grouped/--random", default=None, help="Neighbours hold the same classes, or random ones.  [grouped]")
@click.option("--samples", type=int, help="Train and test on so many of the data.  [all]")
@click.option("--clients", default=20, show_default=True)
@click.option("--join-ratio", default="1", show_default=True, metavar="J|J:J", help="A ratio, or a range drawn from.")
@click.option("--rounds", default=10, show_default=True, help="The papers: 2000.")
@click.option("--lr", type=float, help="Local rate.  [cnn: 0.005; mlps, cnn-small: 0.05; others: 0.01]")
@click.option("--batch-size", default=10, show_default=True)
@click.option("--epochs", default=1, show_default=True, help="Local epochs.")
@click.option("--momentum", default=0.0, show_default=True, help="Of local SGD; and so are the next two.")
@click.option("--weight-decay", default=0.0, show_default=True)
@click.option("--clip", type=float, help="The largest norm of a step's gradient.  [none]")
@click.option("--seed", default=0, show_default=True)
@click.option("--set", "pairs", multiple=True, metavar="NAME=VALUE", help="A setting of the method. May be repeated.")
@click.option("--engine", default="auto", show_default=True, help="auto, loop, threads or stacked.")
@click.option("--device", help="cpu, cuda, ...; by default a GPU where there is one.")
@click.option("--precision", default="full", show_default=True, help="full; on a GPU tf32 or bf16: faster, not exact.")
@data_root_option
@click.option("--out", help="Folder of results; a run cut short goes on from there.  [none]")
def run(method, pairs, join_ratio, **options):
    """Trains METHOD and prints a line a round, and last its accuracies and costs."""
    from pflkit.experiment import experiment

    try:
        options["out"] = options["out"] or None
        settings = dict(_setting(pair) for pair in pairs)
        history = experiment(method, settings=settings, join_ratio=_ratio(join_ratio), progress=1, **options)
    except (ValueError, OSError, ImportError) as error:  # ImportError: texts without torchtext
        refuse(error)
    except FloatingPointError as error:
        raise click.ClickException(str(error)) from None  # diverged: no bad input, ends with 1
    numbers = history.summary()
    points = [name for name in ("accuracy", "before", "after", "global", "best") if name in numbers]
    shown = [f"{name}={numbers[name]:.4f}" for name in points]
    shown += [f"{name}={numbers[name]}" for name in ("bytes_up", "bytes_down")]
    click.echo(" ".join([*shown, f"seconds={numbers['seconds']:.1f}"]))


def _setting(pair):
    name, equals, value = pair.partition("=")
    if not equals:
        raise ValueError(f"--set {pair!r}: must be NAME=VALUE")
    return name, value_of(value)


def _ratio(text):
    """0.5 of "0.5", (0.1, 1.0) of "0.1:1"."""
    try:
        ends = [float(part) for part in text.split(":")]
    except ValueError:
        ends = []
    if len(ends) not in (1, 2):
        raise ValueError(f"join_ratio={text!r}: must be a number or two, as in 0.5 or 0.1:1")
    return ends[0] if len(ends) == 1 else tuple(ends)


if __name__ == "__main__":
    main(prog_name="python -m pflkit")
