"""The papers' experiments, as sets of arguments for `experiment`: at the papers' scale, and reduced.

    fedah("paper")["table1/cifar10-dirichlet"] -> [{"method": "fedah", "dataset": "cifar10", ..., "seed": 0}, ...]
    fedgh("reduced")["fedgh/mixed/cifar10-10clients"], fedapa("reduced")["fedapa/cifar10-dirichlet"] -> likewise

`reduced` is ours, for two CPU cores: fewer samples, rounds and seeds, smaller batches where a paper's are large, and
one learning rate for all methods of a set. What no paper states is ours, too, and said beside it.
"""

from pflkit.checks import choice

# The methods of FedAH's tables (arXiv 2412.01295), in their order as far as it is known.
FEDAH = (
    "fedavg",
    "fedprox",
    "perfedavg",
    "pfedme",
    "fedamp",  # at settings of ours, chosen on digits
    "ditto",
    "fedper",
    "fedrep",
    "fedfomo",
    "fedala",
    "fedah",
)
# The quickest of them, for most reduced sets: the others take two thirds of the time of all.
FEW = ("fedavg", "ditto", "fedper", "fedrep", "fedala", "fedah")
SCALES = ("paper", "reduced")
REDUCED = {  # samples of all clients together, train and test, and the one rate of all methods
    "mnist": {"samples": 1600, "lr": 0.05},
    "cifar10": {"samples": 1600, "lr": 0.05},
    "cifar100": {"samples": 1600, "lr": 0.05},
    "agnews": {"samples": 3200, "lr": 1.0, "rounds": 100, "eval_every": 5},  # before 60 rounds FedAvg learns nothing
    "tiny-imagenet": {"samples": 1600, "lr": 0.05},
}


# FedGH's baselines are not all known; these are ours. FedAvg needs one model for all.
FEDGH = ("local", "fedavg", "fedproto", "lgfedavg", "fd", "fml", "fedkd", "fedgh")
MIXED = "+".join(f"cnn-{i}" for i in range(1, 6))
# The ten that FedAPA's text discusses, so presumably its baselines, and the two ends between which it stands.
FEDAPA = (
    *("local", "fedavg", "fedper"),
    *("fedproto", "fedamp", "fedphp", "fedala", "apple", "pfedhn", "fedpac", "dbe", "fedgh"),
    "fedapa",
)
ABLATION = (
    {},  # FedAPA itself
    {"server_lr": 0.0},  # A = I: each client alone
    {"weights": "uniform"},  # as FedPer
    {"share": "model"},
    {"weights": "uniform", "share": "model"},  # as FedAvg
    {"sign": "paper"},
    {"server_lr": 0.0005},  # below 1/λmax of LeNet-5 and 20 clients at the start, 1/1512
    {"server_lr": 0.002},  # a little above 2/λmax there
    {"self_weight": 1.0},
    {"momentum": 0.9},
    {"sequential": True},
)


def fedah(scale="paper"):
    """Tables I, II, IV and V of the FedAH paper; Table III and Figure 4 are made of Table I's runs.

    20 clients, all join, batches of 10, one local epoch, 2,000 rounds, 5 seeds; unless a table varies it.
    """
    choice("scale", scale, SCALES)
    paper = scale == "paper"
    base = {"clients": 20, "rounds": 2000 if paper else 40, "eval_every": 1 if paper else 2}
    seeds, sets = range(5 if paper else 3), {}

    def add(name, dataset, few=False, **more):
        one = base | {"dataset": dataset} | ({} if paper else REDUCED[dataset]) | more
        methods = FEW if few and not paper else FEDAH
        if dataset == "agnews" and not paper:
            methods = [m for m in methods if m != "ditto"]  # at the rate that FedAvg needs it diverges, with seed 1
        sets[name] = [{"method": m, **one, "seed": seed} for seed in seeds for m in methods]

    for dataset in ("cifar10", "cifar100", "mnist"):
        few, classes = dataset != "cifar10", 10 if dataset == "cifar100" else 2
        add(f"table1/{dataset}-dirichlet", dataset, few, partition="dirichlet", beta=0.1)
        add(f"table1/{dataset}-pathological", dataset, few, partition="pathological", classes=classes)
    add("table1/agnews-dirichlet", "agnews", True, partition="dirichlet", beta=0.1)
    add("table1/tiny-dirichlet", "tiny-imagenet", partition="dirichlet", beta=0.1)
    add("table1/tiny-resnet18-dirichlet", "tiny-imagenet", model="resnet18", partition="dirichlet", beta=0.1)
    for dataset in ("agnews", "tiny-imagenet"):
        for beta in (0.01, 0.5, 1.0):  # 0.1 is Table I's; but for 0.5, which betas are ours
            add(f"table2/{dataset}-beta{beta:g}", dataset, True, partition="dirichlet", beta=beta)
    for clients in (10, 30, 50, 100, 200):  # 20 is Table I's
        name = f"table2/cifar100-clients{clients}"
        add(name, "cifar100", True, partition="dirichlet", beta=0.1, clients=clients)
    for low in (0.5, 0.1):  # 1 is Table I's
        name = f"table4/cifar100-join{low:g}"
        add(name, "cifar100", True, partition="dirichlet", beta=0.1, join_ratio=(low, 1.0))
    for epochs in (5, 10, 20, 40):  # 1 is Table I's; fewer rounds, as in the released script
        rounds = {5: 1000, 10: 800, 20: 500, 40: 300}[epochs] if paper else max(2, base["rounds"] // epochs)
        work = {"epochs": epochs, "rounds": rounds}
        add(f"table5/cifar10-epochs{epochs}", "cifar10", True, partition="dirichlet", beta=0.1, **work)
    return sets


def fedgh(scale="paper"):
    """The FedGH paper's experiments (arXiv 2303.13137) with CNN-1 for all (`same`) and with CNN-1 to 5 (`mixed`).

    What is known of the protocol is the released code's: rate 0.01 with momentum 0.9, decay 0.001, gradients clipped at
    50; 500 rounds of 10 local epochs in batches of 64 (mixed: 30 in batches of 512). Ours: about 10 clients a round for
    any number of them, the classes a client has where they vary, the header's rates, 5 seeds.
    """
    choice("scale", scale, SCALES)
    paper = scale == "paper"
    step = {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-3, "clip": 50.0}
    work = {False: {"epochs": 10, "batch_size": 64}, True: {"epochs": 30, "batch_size": 512}}
    few = {"samples": 1600, "lr": 0.01, "momentum": 0.9, "epochs": 3, "batch_size": 64, "rounds": 30}
    seeds, sets = range(5 if paper else 3), {}

    def add(name, dataset, mixed, methods=FEDGH, clients=100, join=0.1, settings=None, **more):
        one = {"dataset": dataset, "model": MIXED if mixed else "cnn-1", "partition": "classes_per_client"}
        one |= {"classes": 10 if dataset == "cifar100" else 2, "clients": clients, "join_ratio": join}
        one |= step | work[mixed] | {"rounds": 500} if paper else few
        one |= more | ({"settings": settings} if settings else {})
        alone = {"settings": {"everyone": False}} if join < 1 else {}  # no more work than the others
        runs = [{"method": m, **one, **(alone if m == "local" else {})} for m in methods if m != "fedavg" or not mixed]
        sets[f"fedgh/{name}"] = [{**run, "seed": seed} for seed in seeds for run in runs]

    for dataset in ("cifar10", "cifar100"):
        for clients in (10, 50, 100):
            for mixed in (False, True):
                kind = "mixed" if mixed else "same"
                add(f"{kind}/{dataset}-{clients}clients", dataset, mixed, clients=clients, join=10 / clients)
    for dataset, numbers in (("cifar10", (4, 6, 8, 10)), ("cifar100", (30, 50, 70, 90, 100))):
        for classes in numbers:  # 2 and 10 are above
            add(f"classes/{dataset}-{classes}", dataset, True, clients=10, join=1.0, classes=classes)
    for join in (0.3, 0.5, 0.7, 0.9, 1.0):  # 0.1 is above
        add(f"join/cifar10-{join:g}", "cifar10", True, join=join)
    for rate in (0.001, 0.1, 1.0):  # 0.01 is above
        settings = {"header_lr": rate}
        add(f"rates/cifar10-{rate:g}", "cifar10", True, ("fedgh",), clients=10, join=1.0, settings=settings)
    return sets


def fedapa(scale="paper"):
    """The FedAPA paper's experiments (arXiv 2502.07456): three data sets, two kinds of split, an ablation.

    What is known of the protocol is the released code's: LeNet-5, 20 clients of which 60 to 100 % join, rate 0.01 with
    momentum 0.9, 2 local epochs in batches of 64, 50 rounds. Ours: 5 seeds (the code's runs are unseeded); the number
    of classes on CIFAR-100, where its 2 leave the split empty; random classes (`random`) beside its groups of clients
    with the same ones (`grouped`), since a group's are twins; and what the ablation varies.
    """
    choice("scale", scale, SCALES)
    base = {"model": "lenet5", "clients": 20, "join_ratio": (0.6, 1.0), "lr": 0.01, "momentum": 0.9, "epochs": 2}
    paper = scale == "paper"
    few = {"batch_size": 16, "rounds": 30, "eval_every": 2, "samples": 1600}
    base |= {"batch_size": 64, "rounds": 50} if paper else few
    seeds, sets = range(5 if paper else 3), {}
    for dataset in ("fashion-mnist", "cifar10", "cifar100"):
        pathological = {"partition": "pathological", "classes": 10 if dataset == "cifar100" else 2}
        splits = {"dirichlet": {"partition": "dirichlet", "beta": 0.1}}
        splits |= {"grouped": pathological, "random": pathological | {"grouped": False}}
        for split, more in splits.items():
            one, name = base | {"dataset": dataset} | more, f"{dataset}-{split}"
            sets[f"fedapa/{name}"] = [{"method": m, **one, "seed": s} for s in seeds for m in FEDAPA]
            if paper or dataset == "cifar10":
                apa = [{"method": "fedapa", **one, **({"settings": a} if a else {})} for a in ABLATION]
                sets[f"fedapa/ablation/{name}"] = [{**run, "seed": s} for s in seeds for run in apa]
    return sets
