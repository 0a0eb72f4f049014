"""What holds for every method: a new line in METHODS is tested here without another line of test."""

import dataclasses
import importlib

import numpy as np
import pytest
import torch
from torch import nn

from pflkit import data, experiment, models, partition, trees
from pflkit.federation import Federation
from pflkit.messages import Rows, received
from pflkit.methods import FAMILIES, METHODS, make
from pflkit.training import Training

pytestmark = pytest.mark.parametrize("name", METHODS)


def features(h):
    """How many features a linear head of h numbers for ten classes has."""
    return (h - 10) // 10


# Scalars that a sampled client receives and sends, by the sizes of extractor r, head h and model p; or functions of the
# client, and of whom the server has heard of in earlier rounds, each with a class of its own.
PAYLOAD = {
    "local": lambda r, h, p: (0, 0),
    "fedavg": lambda r, h, p: (p, p),
    "fedavg_ft": lambda r, h, p: (p, p),
    "fedper": lambda r, h, p: (r, r),
    "fedrep": lambda r, h, p: (r, r),
    "fedah": lambda r, h, p: (p, p),
    "fedprox": lambda r, h, p: (p, p),
    "pfedme": lambda r, h, p: (p, p),
    "ditto": lambda r, h, p: (p, p),
    "fedphp": lambda r, h, p: (p, p),
    "fedfomo": lambda r, h, p: (4 * p, p + 4),  # M = 5, but there are 4 others; their 4 weights
    "apple": lambda r, h, p: (4 * p, p),  # the 4 others' cores
    "perfedavg": lambda r, h, p: (p, p),
    "fedmeta": lambda r, h, p: (p, p),
    "fedala": lambda r, h, p: (p, p),
    "fedgh": lambda r, h, p: (h, 1 + features(h)),  # each client here has one class: one label, one prototype
    "fd": lambda r, h, p: (lambda known, i: 11 * len(known - {i}), 11),  # ten probabilities and a label a class
    "fml": lambda r, h, p: (p, p),  # the meme, which is here of the clients' own architecture
    "fedproto": lambda r, h, p: (lambda known, i: h // 10 * len(known), h // 10),  # one label, one prototype a class
    "lgfedavg": lambda r, h, p: (h, h),
    "fedapa": lambda r, h, p: (r, r),
    "pfedhn": lambda r, h, p: (p, p),
    # A known class is a prototype; its own the client counts too. What it says of all ten classes, and its variance.
    "fedpac": lambda r, h, p: (lambda known, i: p + (h // 10 - 1) * len(known), p + (h // 10 - 1) * 11 + 2),
    "fedamp": lambda r, h, p: (p, p),
    "moon": lambda r, h, p: (p, p),
    # Nobody trains here: of an update 0 only biases travel, and here matrices are never of one column.
    "fedkd": lambda r, h, p: (BIASES[p], BIASES[p]),
    # A mean representation up in round 1, for which all join; their mean down in round 2.
    "dbe": lambda r, h, p: (
        lambda known, i: p + bool(known) * features(h),
        lambda known, i: p if known else features(h),
    ),
}
BIASES = {582_026: 32 + 64 + 512 + 10, 4_810: 64 + 10}

# Settings with which nothing changes where clients do not train.
STILL = {"fedgh": {"header_lr": 0.0}, "pfedme": {"inner_lr": 0.0}, "apple": {"lr_p": 0.0}}
STILL |= {"fedmeta": {"server_lr": 0.0}, "fedpac": {"head_lr": 0.0}, "dbe": {"kappa": 0.0}}
STILL |= {"pfedhn": {"weight_decay": 0.0}}

# The share of its samples that a client trains on, where it is not all.
TRAINS_ON = {"fedfomo": 0.8}

# Methods whose clients get more after a round that they missed: here none does.
FOLLOW = {"fedkd"}

# Methods whose clients start from models of their own, not from the federation's.
GENERATED = {"pfedhn"}

# Methods whose clients take gradients over all of their data: what a batch is does not matter.
WHOLE = {"fedmeta"}


def all_join(name, t):
    """Whether all clients join round t, whatever the join ratio."""
    return name == "local" or (name, t) == ("dbe", 1)


def everything(state):
    return state.server, state.kept


def personal(held):
    """The clients' own models, where a method has global ones beside them."""
    return held["personal"] if isinstance(held, dict) else held


OF_ROUNDS = ("round", "joined", "energy")  # what is known of rounds: their count, who joined, a schedule's value


def learned(state):
    """Everything but OF_ROUNDS, and but Rows, which are what clients sent the server."""

    def some(part):
        if not isinstance(part, dict):
            return part
        return {k: v for k, v in part.items() if k not in OF_ROUNDS and not isinstance(v, Rows)}

    return some(() if isinstance(state.server, Rows) else state.server), some(state.kept)


def wipe(tree):
    """Zeroes the memory behind every tensor of `tree`, views' owners included."""
    for leaf in trees.leaves(tree):
        leaf.untyped_storage().fill_(0)


class Spy:
    """A method that remembers what its functions got and gave."""

    def __init__(self, method):
        self.method, self.seen = method, []

    def __getattr__(self, name):
        return getattr(self.method, name)

    def local(self, clients, kept, message):
        given = self.method.local(clients, kept, message)
        self.seen.append((kept, message, *given))
        return given


# --- it runs, and is scored ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["mlp", "cnn-small"])
def test_two_rounds_finite_and_scored(name, model, digits):
    """Scores are recomputed here from the models; the mean over clients is unweighted, the pooled one over samples."""
    fed = digits(model, join_ratio=0.5)
    history = experiment.run(make(name), fed, 2)
    assert all(leaf.isfinite().all() for leaf in trees.leaves(everything(history.state)))
    held = personal(fed.deployed(make(name), history.state, 2))
    right = [fed.model.predict(trees.row(held, i), x).argmax(1) == y for i, (x, y) in enumerate(fed.test)]
    last = history.clients[history.clients["round"] == 3].set_index("client")
    assert last["before"].tolist() == [float(r.double().mean()) for r in right]
    assert last["n_test"].tolist() == [len(r) for r in right]
    closing = history.rounds.set_index("round").loc[3]
    assert closing["before"] == pytest.approx(np.mean(last["before"]))
    assert closing["before_pooled"] == pytest.approx(float(torch.cat(right).double().mean()))
    joined = history.clients[history.clients["joined"]]
    assert len(joined) == sum(6 if all_join(name, t) else 3 for t in (1, 2))
    assert joined[["before", "after", "before_loss", "after_loss", "flops"]].notna().all(axis=None)
    assert (joined["flops"] > 0).all()
    assert history.product in ("before", "after")


def test_unseen_classes_and_one_class_clients(name, by_hand, linear, play):
    """Client 0 is tested on class 3, which nobody trains on; client 1 has one class only, in training and test."""
    net = models.from_modules(nn.Sequential(linear(2, 6), nn.ReLU()), linear(6, 4), (2,), 4)
    g = torch.Generator().manual_seed(0)
    labels = [[0, 1, 2] * 5, [1] * 8, [0, 2] * 6]
    train = [(torch.randn(len(y), 2, generator=g), y) for y in labels]
    test = [(torch.randn(len(y), 2, generator=g), y) for y in ([3, 3, 0], [1, 1], [2])]
    fed = by_hand(net, train, test, rule={"lr": 0.1})
    state, rounds = play(fed, make(name), 3)
    for held in map(personal, (rounds[-1].held, fed.deployed(make(name), state, 3))):
        correct, loss = fed.score(held, np.arange(3))
        assert np.isfinite(loss).all()
        for i, (x, y) in enumerate(fed.test):  # the rows of class 3 count like any others
            logits = fed.model.predict(trees.row(held, i), x)
            assert correct[i] == int((logits.argmax(1) == y).sum())
            assert loss[i] == pytest.approx(float(nn.functional.cross_entropy(logits, y)))
    assert all(leaf.isfinite().all() for leaf in trees.leaves(everything(state)))


@pytest.mark.parametrize("drop_last", [False, True])
def test_clients_smaller_than_a_batch(name, uneven, play, drop_last):
    """1, 7, 10 and 11 samples in batches of 10: all train, or the first two do not and are no cause for NaN."""
    fed = uneven(rule={"lr": 0.1, "drop_last": drop_last})
    method, start = make(name), trees.expand(fed.init(), 4)
    if name in GENERATED:
        method = make(name, **STILL[name])
        start = fed.deployed(method, fed.start(method), 2)
    state, rounds = play(fed, method, 2)
    assert all(leaf.isfinite().all() for leaf in trees.leaves((everything(state), rounds[-1].held)))
    held = personal(rounds[0].held)
    trained = [trees.unequal(trees.row(held, i), trees.row(start, i)) > 1e-12 for i in range(4)]  # but for rounding
    whole = not drop_last or name in WHOLE
    assert trained == [whole or round(TRAINS_ON.get(name, 1) * n) >= 10 for n in (1, 7, 10, 11)]


def test_a_batch_larger_than_all_clients_trains_nobody_if_dropped(name, uneven, play):
    fed = uneven(rule={"lr": 0.1, "batch_size": 64, "drop_last": True}, dtype=torch.float32)
    method = make(name, **STILL.get(name, {}))
    state, _ = play(fed, method, 2)
    assert trees.unequal(learned(state), learned(fed.start(method))) == 0


def test_one_client_alone_in_the_world(name, by_hand, linear):
    net = models.from_modules(nn.Sequential(linear(2, 6), nn.ReLU()), linear(6, 2), (2,), 2)
    history = experiment.run(make(name), by_hand(net, [(torch.randn(7, 2), [0, 1] * 3 + [0])], rule={"lr": 0.1}), 2)
    assert history.rounds["after"].notna().sum() == 2


@pytest.mark.parametrize("head_layers", [0, 2])
def test_all_is_extractor_or_all_is_head(name, head_layers, digits):
    """Two rounds, or one line that says which head the method needs, before any training."""
    fed = digits(head_layers=head_layers)
    refuses = {"fedgh": (0, 2), "fedproto": (0, 2), "fedapa": (2,), "dbe": (0, 2)}
    if head_layers in refuses.get(name, ()):
        with pytest.raises(ValueError, match=r"^model='mlp': (Fed(GH|Proto|APA)|DBE) "):
            experiment.run(make(name), fed, 2)
        return
    state = experiment.run(make(name), fed, 2).state
    assert all(leaf.isfinite().all() for leaf in trees.leaves(everything(state)))


# --- what a client sees, and what it may touch -----------------------------------------------------------------------


def test_unsampled_clients_are_not_touched(name, digits):
    """Bit for bit, in every round, and by scoring neither."""
    fed, method = digits(join_ratio=0.3), make(name)
    state = fed.start(method)
    for _ in range(4):
        before = trees.clone(state.kept)
        ids = fed.play(method, state, 4).ids
        fed.deployed(method, state, 4)
        absent = np.setdiff1d(np.arange(6), ids)
        assert trees.unequal(trees.take(state.kept, absent), trees.take(before, absent)) == 0


def test_a_client_alone_is_itself_among_others(name, digits, play):
    fed, method = digits(), make(name)
    state, _ = play(fed, method, 2)
    everyone = np.arange(6)
    message = received(method.download(state.server, everyone), 6)
    together = method.local(fed.clients(everyone, 3, 3), trees.take(state.kept, everyone), message)
    for ids in ([4], [1, 4, 5]):
        some = method.local(fed.clients(np.array(ids), 3, 3), trees.take(state.kept, ids), trees.take(message, ids))
        assert trees.unequal(some, trees.take(together, ids)) == 0
    assert trees.unequal(trees.row(together[2], 4), trees.row(together[2], 5)) > 0


def test_arguments_are_not_changed(name, digits, play):
    """Not by `local`, `merge`, `deploy` or `watch`."""
    fed, method = digits(join_ratio=0.5), make(name)
    state, _ = play(fed, method, 2)
    ids = fed.sample(3)
    clients, kept = fed.clients(ids, 3, 3), trees.take(state.kept, ids)
    message = received(method.download(state.server, ids), len(ids))
    given = state.server, state.kept, kept, message
    before = trees.clone(given)
    method.deploy(clients, kept, message)
    _, upload, _ = method.local(clients, kept, message)
    sent = trees.clone(upload)
    method.merge(state.server, ids, message, upload, clients.n)
    if hasattr(method, "watch"):
        method.watch(state.server, state.kept)
    assert trees.unequal(given, before) == 0
    assert trees.unequal(upload, sent) == 0


def test_nothing_that_passed_is_aliased(name, digits):
    """Wiping all that `local` got and gave, and what `deployed` returned, does not change the state."""
    fed, spy = digits(join_ratio=0.5), Spy(make(name))
    state = fed.start(spy)
    for _ in range(2):
        result = fed.play(spy, state, 2)
        after = trees.clone(everything(state))
        wipe(fed.deployed(spy, state, 2))
        wipe(tuple(spy.seen))
        wipe(result.held)
        assert trees.unequal(everything(state), after) == 0


def test_scoring_changes_nothing_and_repeats(name, digits, play):
    fed, method = digits(join_ratio=0.5), make(name)
    state = fed.start(method)
    for _ in range(2):
        fed.play(method, state, 3)
    before = trees.clone(everything(state))
    first, second = (fed.deployed(method, state, 3) for _ in range(2))
    assert trees.unequal(first, second) == 0
    assert trees.unequal(everything(state), before) == 0
    unscored, _ = play(fed, method, 3)
    fed.play(method, state, 3)
    assert trees.unequal(everything(state), everything(unscored)) == 0


def test_test_labels_train_nothing(name, play):
    """All test labels wrong: the same parameters to the bit; only the scores differ."""
    real = data.load("digits")
    x, y = real.x[:120], real.y[:120]
    rows = np.split(np.arange(120), 6)
    wrong = y.copy()
    wrong[np.concatenate(rows[1::2])] = (y[np.concatenate(rows[1::2])] + 1) % 10
    states, losses = [], []
    for labels in (y, wrong):
        dataset = data.Dataset("digits-120", x, labels, real.classes)
        split = partition.custom(labels, rows[::2], rows[1::2])
        fed = Federation(dataset, split, models.build("mlp", x.shape[1:], 10), training=Training(lr=0.1))
        state, rounds = play(fed, make(name), 2)
        states.append((everything(state), rounds[-1].held, fed.deployed(make(name), state, 2)))
        losses.append(fed.score(personal(rounds[-1].held), np.arange(3))[1])
    assert trees.unequal(*states) == 0
    assert (losses[0] != losses[1]).all()


# --- limits, repetition, engines -------------------------------------------------------------------------------------


def test_a_rate_of_zero_changes_nothing(name, digits, play):
    """Sums are not carried from round to round: after three rounds all is as it was, to the bit."""
    fed = digits(join_ratio=0.5, rule={})
    fed.training = dataclasses.replace(fed.training, lr=0.0, momentum=0.9)
    method = make(name, **STILL.get(name, {}))
    state, _ = play(fed, method, 3)
    assert trees.unequal(learned(state), learned(fed.start(method))) == 0


@pytest.mark.parametrize("model", ["mlp", "cnn-small"])
def test_same_seed_same_result_on_one_thread_or_two(name, model, digits, play):
    """In the loop, again in the loop after other draws, and with a client a thread: equal to the bit."""
    before = torch.get_num_threads()
    ends = []
    try:
        for engine, threads in (("loop", 1), ("loop", 2), ("threads", 2)):
            torch.set_num_threads(threads)
            state, rounds = play(digits(model, join_ratio=0.5, engine=engine, seed=5), make(name), 2)
            ends.append((everything(state), rounds[-1].held))
            torch.rand(3), np.random.rand(3)
    finally:
        torch.set_num_threads(before)
    assert trees.unequal(ends[0], ends[1]) == 0
    assert trees.unequal(ends[0], ends[2]) == 0


def test_another_seed_is_another_run(name, digits, play):
    ends = [everything(play(digits(seed=seed), make(name), 1)[0]) for seed in (0, 1)]
    assert trees.unequal(*ends) > 0


def test_global_random_states_are_left_alone(name, digits, play):
    torch.manual_seed(3), np.random.seed(3)
    expected = torch.rand(1), np.random.rand()
    torch.manual_seed(3), np.random.seed(3)
    play(digits(join_ratio=0.5), make(name), 1)
    assert (torch.rand(1), np.random.rand()) == expected


def test_every_method_sees_the_same_clients(name, digits):
    """Local lets everyone train, and so does DBE's first round, but the draw is the same."""
    fed = digits(join_ratio=0.5, seed=3)
    state = fed.start(make(name))
    for t in (1, 2, 3):
        ids = fed.play(make(name), state, 3).ids.tolist()
        assert ids == (list(range(6)) if all_join(name, t) else fed.sample(t).tolist())


# --- the ledger ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "shape", "r", "h"),
    [("cnn", (1, 28, 28), 576_896, 5_130), ("mlp", (1, 8, 8), 64 * 64 + 64, 64 * 10 + 10)],
)
def test_bytes_are_the_papers(name, model, shape, r, h, by_hand):
    """4 bytes a scalar, for each sampled client and nobody else; nothing for what only labels or scores."""
    assert name in PAYLOAD, "a new method's payload belongs into PAYLOAD"
    clients = [(torch.zeros(1, *shape), [k]) for k in range(5)]
    ratio = 1.0 if name in FOLLOW else 0.4
    fed = by_hand(models.build(model, shape, 10), clients, rule={"epochs": 0}, join_ratio=ratio, dtype=torch.float32)
    down, up = PAYLOAD[name](r, h, r + h)
    history = experiment.run(make(name), fed, 2)
    joined = history.clients[history.clients["joined"]]
    assert len(joined) == sum(5 if all_join(name, t) else 5 * ratio for t in (1, 2))
    for way, scalars in (("bytes_down", down), ("bytes_up", up)):
        expected, known = [], set()
        for _, ids in joined.groupby("round")["client"]:
            expected += [4 * (scalars(known, i) if callable(scalars) else scalars) for i in ids]
            known |= set(ids)
        assert joined[way].tolist() == expected
        assert history.summary()[way] == sum(expected)
    assert history.clients[~history.clients["joined"]][["bytes_up", "bytes_down"]].sum().sum() == 0


# --- settings and documentation --------------------------------------------------------------------------------------


def test_it_is_in_one_family(name):
    assert sum(name in family for family in FAMILIES.values()) == 1


def test_settings_are_checked_by_name(name):
    method = make(name)
    assert make(name, **dataclasses.asdict(method)) == method
    with pytest.raises(dataclasses.FrozenInstanceError):
        method.lr = 1.0
    with pytest.raises(ValueError, match=f"misspelt=1: {name} has no such setting"):
        make(name, misspelt=1)
    for setting in dataclasses.fields(method):
        for wrong in ("1", object(), [1]):
            with pytest.raises(ValueError, match=f"{setting.name}=.*must be"):
                make(name, **{setting.name: wrong})
        if not isinstance(getattr(method, setting.name), bool | str):
            for impossible in (-1, float("nan"), float("inf"), True):
                with pytest.raises(ValueError, match=f"{setting.name}=.*must be"):
                    make(name, **{setting.name: impossible})


def test_its_file_answers_every_question(name):
    method = METHODS[name]
    text = importlib.import_module(method.__module__).__doc__
    for heading in ("Source:", "Travels:", "Keeps:", "Evaluated:", "Where released code differs"):
        assert heading in text
    assert method.paper
    assert method.product in ("before", "after")
