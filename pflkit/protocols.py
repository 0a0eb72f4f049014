"""The papers' experiments, as sets of arguments for `experiment`: at the papers' scale, and reduced.

    fedah("paper")["table1/cifar10-dirichlet"] -> [{"method": "fedah", "dataset": "cifar10", ..., "seed": 0}, ...]

`reduced` is ours, for two CPU cores: fewer samples, rounds and seeds, and one learning rate for all methods of a set.
What no paper states is ours, too, and said beside it.
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
# The quickest of them, for the reduced sets beyond Table I's images: the others take half of the time of all.
FEW = ("fedavg", "ditto", "fedper", "fedrep", "fedala", "fedah")
SCALES = ("paper", "reduced")
REDUCED = {  # samples of all clients together, train and test, and the one rate of all methods
    "mnist": {"samples": 1600, "lr": 0.05},
    "cifar10": {"samples": 1600, "lr": 0.05},
    "cifar100": {"samples": 1600, "lr": 0.05},
    "agnews": {"samples": 3200, "lr": 1.0, "rounds": 100, "eval_every": 5},  # before 60 rounds FedAvg learns nothing
    "tiny-imagenet": {"samples": 1600, "lr": 0.05},
}


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
        sets[name] = [{"method": m, **one, "seed": seed} for seed in seeds for m in methods]

    for dataset in ("cifar10", "cifar100", "mnist"):
        add(f"table1/{dataset}-dirichlet", dataset, partition="dirichlet", beta=0.1)
        classes = 10 if dataset == "cifar100" else 2
        add(f"table1/{dataset}-pathological", dataset, partition="pathological", classes=classes)
    add("table1/agnews-dirichlet", "agnews", few=True, partition="dirichlet", beta=0.1)
    add("table1/tiny-dirichlet", "tiny-imagenet", partition="dirichlet", beta=0.1)
    add("table1/tiny-resnet18-dirichlet", "tiny-imagenet", model="resnet18", partition="dirichlet", beta=0.1)
    for dataset in ("agnews", "tiny-imagenet"):
        for beta in (0.01, 0.5, 1.0):  # 0.1 is Table I's; but for 0.5, which betas are ours
            add(f"table2/{dataset}-beta{beta:g}", dataset, few=True, partition="dirichlet", beta=beta)
    for clients in (10, 30, 50, 100, 200):  # 20 is Table I's
        name = f"table2/cifar100-clients{clients}"
        add(name, "cifar100", few=True, partition="dirichlet", beta=0.1, clients=clients)
    for low in (0.5, 0.1):  # 1 is Table I's
        add(f"table4/cifar100-join{low:g}", "cifar100", partition="dirichlet", beta=0.1, join_ratio=(low, 1.0))
    for epochs in (5, 10, 20, 40):  # 1 is Table I's; fewer rounds, as in the released script
        rounds = {5: 1000, 10: 800, 20: 500, 40: 300}[epochs] if paper else max(2, base["rounds"] // epochs)
        work = {"epochs": epochs, "rounds": rounds}
        add(f"table5/cifar10-epochs{epochs}", "cifar10", few=True, partition="dirichlet", beta=0.1, **work)
    return sets
