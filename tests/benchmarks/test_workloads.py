"""Shapes, sizes, determinism, sharding and learning of the benchmark workloads."""

import pytest
import torch

from benchmarks import workloads
from benchmarks.workloads import gpt
from benchmarks.workloads.measure import measure_compute

pytest.importorskip("sklearn")
NAMES = workloads.names()


def train(workload, steps, ranks=1, rate=1.0):
    model = workload.model()
    optimizer = workload.optimizer(model.parameters(), rate)
    scheduler = workload.scheduler(optimizer, steps)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(ranks):
            inputs, targets = workload.batch(rank, step, ranks)
            (workload.loss(model(inputs), targets) / ranks).backward()
        optimizer.step()
        scheduler.step()
    return model


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match="mlp, resnet, vgg, gpt"):
        workloads.get("bert")


def test_the_mlp_is_the_one_of_the_design():
    weights = [p for p in workloads.get("mlp").model().parameters() if p.dim() == 2]
    assert [tuple(w.shape) for w in weights] == [(1024, 1024)] * 8
    assert workloads.get("mlp").gradient_bytes == 8 * (1024 * 1024 + 1024) * 4


@pytest.mark.parametrize("name", ["resnet", "vgg", "gpt"])
def test_gradients_are_a_few_megabytes(name):
    assert 2e6 < workloads.get(name).gradient_bytes < 5e6


def test_where_the_weight_lies():
    vgg = dict(workloads.get("vgg").model().named_parameters())
    dense = sum(p.numel() for p in vgg.values() if p.dim() == 2)
    assert dense > 0.85 * sum(p.numel() for p in vgg.values())
    decoder = dict(workloads.get("gpt").model().named_parameters())
    assert next(iter(decoder)) == "words.weight"
    assert decoder["words.weight"].numel() > 0.5 * sum(p.numel() for p in decoder.values())


@pytest.mark.parametrize("name", NAMES)
def test_the_seed_decides_everything(name):
    first, again, other = (workloads.get(name, batch_size=4, seed=seed) for seed in (1, 1, 2))
    state = torch.random.get_rng_state()
    models = [workload.model().state_dict() for workload in (first, again, other)]
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(models[0][key], models[1][key]) for key in models[0])
    assert any(not torch.equal(models[0][key], models[2][key]) for key in models[0])
    step = first.steps_per_epoch(2) + 3
    again.batch(0, 0)  # what was asked before does not matter
    for mine, same in zip(first.batch(1, step, 2), again.batch(1, step, 2), strict=True):
        assert torch.equal(mine, same)
    assert not torch.equal(first.batch(1, step, 2)[0], other.batch(1, step, 2)[0])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1, 3])
def test_ranks_share_out_the_training_set(name, size):
    workload = workloads.get(name, batch_size=7)
    count = len(workload.training_set()[0])
    numbers = torch.arange(count)
    workload.training_set = lambda: (numbers.float().view(-1, 1, 1, 1).expand(-1, 1, 32, 32), numbers)
    seen = []
    for step in range(workload.steps_per_epoch(size)):
        for rank in range(size):
            inputs, targets = workload.batch(rank, step, size)
            assert torch.equal(inputs[:, 0, 0, 0], targets.float())
            seen += targets.tolist()
    assert len(seen) == len(set(seen)) > count - 8 * size
    next_epoch = workload.batch(0, workload.steps_per_epoch(size), size)[1].tolist()
    assert next_epoch != seen[:7]


@pytest.mark.parametrize("name", ["mlp", "resnet", "vgg"])
def test_training_and_test_images_are_different(name):
    training, test = workloads.get(name).training_set()[0], workloads.get(name).test_set()[0]
    assert training.shape == (1437, 1, 32, 32)
    assert test.shape == (360, 1, 32, 32)
    seen = {image.numpy().tobytes() for image in training}
    assert sum(image.numpy().tobytes() in seen for image in test) == 0


def test_images_are_shifted_anew_each_epoch():
    workload = workloads.get("vgg", batch_size=16)
    images = workload.training_set()[0][:16]
    numbers = torch.arange(16)
    shifted, again, later = (workload.augment(images, epoch, numbers) for epoch in (0, 0, 1))
    assert torch.equal(shifted, again)
    assert not torch.equal(shifted, later)
    for image, moved in zip(images, shifted, strict=True):
        padded = torch.nn.functional.pad(image[None], (4, 4, 4, 4), mode="replicate")[0, 0]
        places = padded.unfold(0, 32, 1).unfold(1, 32, 1).reshape(-1, 32, 32)
        assert any(torch.equal(place, moved[0]) for place in places)


def test_text_is_real_and_targets_are_the_next_words():
    inputs, targets = workloads.get("gpt").training_set()
    assert inputs.shape == targets.shape == (len(inputs), gpt.CONTEXT)
    assert len(gpt.tokens()) > 100_000
    assert len(gpt.tokens().unique()) > 3000
    known = targets[:, :-1] != gpt.IGNORED
    assert torch.equal(inputs[:, 1:][known], targets[:, :-1][known])


def test_the_decoder_sees_no_later_word():
    model = workloads.get("gpt").model().eval()
    inputs = workloads.get("gpt").batch(0, 0)[0][:1]
    changed = inputs.clone()
    changed[0, 20:] = (changed[0, 20:] + 1) % gpt.VOCABULARY
    torch.testing.assert_close(model(inputs)[:, :20], model(changed)[:, :20])
    assert not torch.allclose(model(inputs)[:, 20:], model(changed)[:, 20:])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "batch_size", "steps", "wanted"),
    [("mlp", 32, 40, 0.6), ("resnet", 16, 60, 0.6), ("vgg", 16, 40, 0.7), ("gpt", 4, 60, 0.18)],
)
def test_training_learns(name, batch_size, steps, wanted):
    workload = workloads.get(name, batch_size=batch_size)
    before = workload.accuracy(workload.model())
    after = workload.accuracy(train(workload, steps, ranks=2))
    assert before < 0.3
    assert after > max(wanted, before)


def test_accuracy_counts_hits_and_leaves_the_mode():
    workload = workloads.get("vgg")
    targets = workload.test_set()[1]

    class Oracle(torch.nn.Module):
        """Right on all but every tenth image."""

        at = 0

        def forward(self, inputs):
            assert not self.training
            mine = targets[self.at : self.at + len(inputs)].clone()
            wrong = (torch.arange(self.at, self.at + len(inputs)) % 10) == 0
            self.at += len(inputs)
            return torch.nn.functional.one_hot((mine + wrong) % 10, 10).float()

    oracle = Oracle()
    assert workload.accuracy(oracle) == pytest.approx(0.9)
    assert oracle.training


@pytest.mark.parametrize("bad", [{"rank": 2, "step": 0, "size": 2}, {"rank": 0, "step": -1, "size": 2}])
def test_impossible_batches_are_refused(bad):
    with pytest.raises(ValueError, match="give"):
        workloads.get("vgg").batch(**bad)


def test_more_examples_a_step_than_there_are_is_refused():
    with pytest.raises(ValueError, match="at most 359"):
        workloads.get("vgg", batch_size=400).steps_per_epoch(4)
    with pytest.raises(ValueError, match="at least 1"):
        workloads.get("vgg", batch_size=0)


def test_measuring_leaves_threads_and_cores_alone():
    import os

    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    measured = measure_compute(workloads.get("gpt", batch_size=1), steps=3)
    assert 0 < measured.forward_backward_s < measured.step_s
    assert measured.gradient_bytes == workloads.get("gpt").gradient_bytes
    assert (os.sched_getaffinity(0), torch.get_num_threads()) == (cores, threads)
    with pytest.raises(ValueError, match="at least 2"):
        measure_compute(workloads.get("gpt"), steps=1)
