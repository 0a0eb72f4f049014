"""What a claim asks of the runs it is checked with: for any verdict, and to be reproduced."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass

from pflkit import costs, data, images, text
from pflkit.claims.comparisons import settings_of
from pflkit.methods import METHODS

PATIENCE = 100  # evaluations without a new best: FedAH's released code; its paper: "an early stopping mechanism"
NUMBERS = "the paper's numbers"  # the part of a claim that compares them: at full scale only
SIZES = {  # which data sets are real, and how many samples are full data: all that the loader yields where all is there
    "digits": 1_797,
    "mnist": sum(data.MNIST_SIZES.values()),
    "fashion-mnist": sum(data.MNIST_SIZES.values()),
    "cifar10": sum(images.CIFAR_SIZES),
    "cifar100": sum(images.CIFAR_SIZES),
    "tiny-imagenet": images.TINY_CLASSES * images.TINY_EACH,
    "agnews": sum(text.ROWS.values()),
}


@dataclass(frozen=True)
class Paper:
    """What runs must share with a paper's own to reproduce it.

    protocol(data set, model, partition): what it fixes, as it stands in a run's configuration. min_size: the most
    samples that a client of a Dirichlet split may be sure of. needs: the method without which no claim of the paper
    says anything, nor with it alone a claim that names others; "" where there is none.
    """

    protocol: Callable
    min_size: float = math.inf
    needs: str = ""


@dataclass(frozen=True)
class Claim:
    """What a paper says, and what it takes to reproduce it.

    methods: all it speaks of, or the variants of one, by labels as `evidence.label` makes them. measure(runs): the
    comparisons that the runs there are allow, among them an Unchecked for each of its parts that they do not; or a
    text: why none. settings: the (data set, model) pairs of the paper. parts: where it says several things, each as
    (text, methods it takes, or None if no run checks it). remark: how to read its numbers. Claims about strong
    heterogeneity are `skewed`, about what follows convergence `settled`, about the ledger `exact`. endless: the methods
    whose runs need not converge, for it says that they do not.

    varies: of a claim that compares sets of runs, the key of the configuration that tells them apart, and others that
    may differ with it, none else; or a method's setting, as "method setting"; or "scenario", which is `scenario`'s. Its
    measure takes {value of that key: runs}, values in order. Sets without a value are left out.
    """

    id: str
    paper: Paper
    text: str
    methods: tuple
    measure: Callable
    settings: tuple = ()
    parts: tuple = ()
    skewed: bool = False
    settled: bool = False
    exact: bool = False
    endless: tuple = ()
    varies: tuple = ()
    remark: str = ""

    @property
    def kind(self):
        """What its `methods` are, in words."""
        return "variants" if any(" " in name for name in self.methods) else "methods"


def named(label):
    """(method, {setting: its value as text}) of a label as `evidence.label` makes them.

    >>> named("fedapa server_lr=0.0 share=model")
    ('fedapa', {'server_lr': '0.0', 'share': 'model'})
    """
    method, *settings = label.split()
    return method, dict(setting.split("=", 1) for setting in settings)


def values_of(config):
    """What a protocol fixes or a claim varies, by name, of a configuration; dataset: (data set, model).

    A setting's name is "method setting", so that none is taken for a key of the partition or the training.
    """
    of_data = {"dataset": (config["dataset"]["name"], config["model"]["name"]), "rounds": config["rounds"]}
    of_data["scenario"] = scenario(config)
    of_clients = {"clients": config["clients"], "join_ratio": tuple(config["join_ratio"])}
    split = config["partition"] | {"partition": config["partition"]["name"]}
    return split | config["training"] | of_data | of_clients | settings_of(config)


def scenario(config):
    """The data set, model and split of a configuration, in words: PA1's. None for a split of neither of its two kinds,
    by a Dirichlet distribution, or pathological with groups of clients that have the same classes.
    """
    split = config["partition"]
    if split["name"] == "dirichlet":
        kind = f"Dirichlet({split['beta']:g})"
    elif split["name"] == "pathological" and split.get("grouped"):
        kind = f"pathological ({split['classes']} classes)"
    else:
        return None
    return f"{config['dataset']['name']}, {config['model']['name']}, {kind}"


def config_of(claim, runs):
    """The configuration of a set {method: [History]}, of its first run of the claim's; None without one."""
    return next((runs[name][0].config for name in claim.methods if runs.get(name)), None)


def varied(claim, runs):
    """The value of what the claim varies, in a set {method: [History]}; None without one."""
    config = config_of(claim, runs)
    return config and values_of(config).get(claim.varies[0])


def departures(claim, config):
    """{key: how the configuration departs from what the claim's paper fixes}, but for the key that the claim varies."""
    have = values_of(config)
    wanted = claim.paper.protocol(*have["dataset"], have["partition"])
    wanted = {k: v for k, v in wanted.items() if k not in claim.varies[:1]}
    return {k: f"{k} {have.get(k)}, the protocol: {v}" for k, v in wanted.items() if have.get(k) != v}


def lacks(claim, there):
    """What these runs lack for any verdict, as a list."""
    histories = [h for group in there.values() for h in group]
    name, partition = histories[0].config["dataset"]["name"], histories[0].config["partition"]
    lacking = []
    if name not in SIZES:
        lacking.append(f"{name} is not known to be a real data set")
    if (seeds := min(len(group) for group in there.values())) < 3:
        lacking.append(f"{seeds} of at least 3 seeds")
    if claim.skewed and partition["name"] != "pathological" and not partition.get("beta", math.inf) <= 0.1:
        lacking.append("clients are not strongly heterogeneous (pathological, or Dirichlet with beta up to 0.1)")
    return lacking + (unsettled(histories) if claim.settled else [])


def falls_short(claim, there):
    """What these runs lack to reproduce the claim, or not, as a list."""
    histories = [h for group in there.values() for h in group]
    config = histories[0].config
    name, model, partition = config["dataset"]["name"], config["model"]["name"], config["partition"]
    short = []
    if (name, model) not in claim.settings:
        one = len(claim.settings) == 1
        short.append(f"{name} with {model}, the paper: {' with '.join(claim.settings[0]) if one else 'others'}")
    held = [h.clients.drop_duplicates("client")[["n_train", "n_test"]].to_numpy().sum() for h in histories]
    if min(held) < SIZES[name]:
        short.append("a part of the data")
    short += departures(claim, config).values()
    if (least := partition.get("min_size", 0)) > claim.paper.min_size:
        short.append(f"min_size {least}, the protocol: at most {claim.paper.min_size}")
    if name in data.LOADERS:
        own, default = config["dataset"], data.settings_of(name)
        short += [f"{name}'s {k} {own.get(k)}, its default: {v}" for k, v in default.items() if own.get(k) != v]
    for label in there:
        method, varied_by_label = named(label)
        own, default = there[label][0].config["settings"], asdict(METHODS[method]()) if method in METHODS else {}
        default = {k: v for k, v in default.items() if k not in varied_by_label and f"{method} {k}" not in claim.varies}
        short += [f"{label}'s {k} {own.get(k)}, its default: {v}" for k, v in default.items() if own.get(k) != v]
    if (seeds := min(len(group) for group in there.values())) < 5:
        short.append(f"{seeds} of at least 5 seeds")
    return short + unsettled([h for name, group in there.items() if name not in claim.endless for h in group])


def unsettled(histories):
    """Why nothing can be said of what follows convergence, as a list; empty if all have converged."""
    left = sum(costs.rounds_to_convergence(h, PATIENCE) is None for h in histories)
    rule = f"the stopping rule of FedAH's released code: {PATIENCE} evaluations without a new best"
    return [f"{left} of {len(histories)} runs not converged ({rule})"] if left else []
