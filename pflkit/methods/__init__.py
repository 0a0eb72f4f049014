"""All methods by name. A new one is a file here, its import, and a line in METHODS.

What a method has. C clients are sampled; every leaf of a tree of theirs is [C, ...].

    paper, product       strings: what `list` prints; "before" or "after": which accuracy is the method's own
    server(fed)          the server's tree; fed.init() is the initial (extractor, head)
    client(group)        what each client keeps; group.each_client(tree) copies a value for each, group.sizes
                                      are the training samples of all clients [N]
    download(server, ids)             a message: tensors [C, ...], Shared(tree), Rows(values, present)
    local(clients, kept, message)     (what it keeps, its upload, the model it holds), each [C, ...]
    merge(server, ids, message, upload, n)    the new server's tree; n [C], a numpy array of training samples
    deploy(clients, kept, message)    the model (extractor, head) [C, ...] before training

The model that `local` and `deploy` give may be two, {"personal": a model, "global": a model}, where a method has both.

and only where a paper needs them

    watch(server, kept)               {name: tree}: values whose distribution is recorded each round
    begin(server, round, rounds)      the server's tree as a round begins, where it is to know which one: from 1 to
                                      rounds, and rounds + 1 when all is scored at the end
    joins(round, sampled, everyone)   other ids than the sampled ones
    cohort               so many clients meet the server at a time, one cohort after the other
    heterogeneous        True: clients may have different models; `client`, `local`, `deploy` are then called once for
                         each, and all uploads have one structure

What `clients` offers to `local` and `deploy` (see pflkit.training.Clients): ids, n, class_counts, round, rounds,
join_ratio, model; sgd, and steps of other kinds (with descent.slope); mean, gradient and class_mean of local data;
through, part, split; beside, for a second model that all clients share, which fed.second(name), group.second and
clients.second give.
"""

import dataclasses
import numbers
import types
import typing

from pflkit.checks import choice
from pflkit.methods.apple import APPLE
from pflkit.methods.dbe import DBE
from pflkit.methods.ditto import Ditto
from pflkit.methods.fd import FD
from pflkit.methods.fedah import FedAH
from pflkit.methods.fedala import FedALA
from pflkit.methods.fedamp import FedAMP
from pflkit.methods.fedapa import FedAPA
from pflkit.methods.fedavg import FedAvg
from pflkit.methods.fedavg_ft import FedAvgFT
from pflkit.methods.fedfomo import FedFomo
from pflkit.methods.fedgh import FedGH
from pflkit.methods.fedkd import FedKD
from pflkit.methods.fedmeta import FedMeta
from pflkit.methods.fedpac import FedPAC
from pflkit.methods.fedper import FedPer
from pflkit.methods.fedphp import FedPHP
from pflkit.methods.fedproto import FedProto
from pflkit.methods.fedprox import FedProx
from pflkit.methods.fedrep import FedRep
from pflkit.methods.fml import FML
from pflkit.methods.lgfedavg import LGFedAvg
from pflkit.methods.local import Local
from pflkit.methods.moon import MOON
from pflkit.methods.perfedavg import PerFedAvg
from pflkit.methods.pfedhn import PFedHN
from pflkit.methods.pfedme import PFedMe

METHODS = {
    "local": Local,
    "fedavg": FedAvg,
    "fedavg_ft": FedAvgFT,
    "fedprox": FedProx,
    "moon": MOON,
    "perfedavg": PerFedAvg,
    "fedmeta": FedMeta,
    "pfedme": PFedMe,
    "ditto": Ditto,
    "fedphp": FedPHP,
    "fedamp": FedAMP,
    "fedfomo": FedFomo,
    "apple": APPLE,
    "fedper": FedPer,
    "fedrep": FedRep,
    "fedala": FedALA,
    "fedah": FedAH,
    "fedgh": FedGH,
    "fedproto": FedProto,
    "lgfedavg": LGFedAvg,
    "fd": FD,
    "fml": FML,
    "fedkd": FedKD,
    "fedapa": FedAPA,
    "pfedhn": PFedHN,
    "fedpac": FedPAC,
    "dbe": DBE,
}


# What methods do about clients that differ: {family: {method: its main idea}}. Ours, after the papers' introductions.
FAMILIES = {
    "baselines": {
        "local": "each alone",
        "fedavg": "one model for all: the average",
        "fedavg_ft": "the average, then tuned at home",
    },
    "training pulled towards something": {
        "fedprox": "training is pulled towards the global model",
        "moon": "features are pulled towards the global model's, away from one's own last",
        "pfedme": "a personal model, held near the global one by a spring",
        "ditto": "a personal model beside the global one, pulled towards it",
        "fedphp": "one's past models' moving average teaches the new one",
    },
    "a start that adapts in few steps": {
        "perfedavg": "trained to be a good start for one gradient step",
        "fedmeta": "the same as meta-learning: support and query data; rates may be learned",
    },
    "models mixed for each client": {
        "fedamp": "the server mixes, for each client, models like its own",
        "fedfomo": "the client mixes others' models by how much each helps it",
        "apple": "the client learns, by gradient, how much of whose model it wants",
        "fedapa": "the server learns, by gradient, whose extractors to mix for whom",
    },
    "heads mixed for each client": {
        "fedala": "own and global model, mixed element by element before training",
        "fedah": "own and global head, mixed element by element by learned weights",
        "fedpac": "heads mixed by a quadratic program of bias and variance",
    },
    "a part of one's own": {
        "fedper": "own head, shared extractor",
        "fedrep": "the same, trained in turns",
        "lgfedavg": "own extractor, shared head",
        "dbe": "an own bias of the features; their mean held to a global one",
    },
    "knowledge travels, not the model": {
        "fedgh": "one header, trained on all clients' class means",
        "fedproto": "features are pulled towards all clients' class means",
        "fd": "predictions are pulled towards the others', class by class",
        "fml": "own and shared small model teach each other",
        "fedkd": "the same, weighted by how good both are, and compressed",
    },
    "generated by the server": {
        "pfedhn": "a network at the server makes each client's model out of an embedding",
    },
}


def make(name, **settings):
    """The method called `name` with `settings` of its own, e.g. make("fedah", weight_lr=1.0).

    Raises ValueError naming an unknown method, an unknown setting, one of the wrong type, or an impossible value.
    """
    method = METHODS[choice("method", name, METHODS)]
    types_of = {field.name: typing.get_type_hints(method)[field.name] for field in dataclasses.fields(method)}
    for key, value in settings.items():
        if key not in types_of:
            allowed = ", ".join(types_of) or "none"
            raise ValueError(f"{key}={value!r}: {name} has no such setting; its settings: {allowed}")
        if not _fits(value, types_of[key]):
            wanted = getattr(types_of[key], "__name__", types_of[key])
            raise ValueError(f"{key}={value!r}: must be of type {wanted}")
    return method(**settings)


def _fits(value, kind):
    if isinstance(kind, types.UnionType):
        return any(_fits(value, k) for k in typing.get_args(kind))
    if kind in (int, float):  # a whole number will do for a float; True and False are not numbers
        return isinstance(value, numbers.Integral if kind is int else numbers.Real) and not isinstance(value, bool)
    return isinstance(value, kind)
