"""What a ballot carries, whether its facts are numbers or live on a device."""

from __future__ import annotations

import torch

from crossover.comm import Solo
from crossover.reduction import Reduction, scaling_for
from crossover.selsync.ballot import Ballot, Field, decision_of


def test_numbers_and_tensors_reach_their_fields() -> None:
    facts = {
        Field.WANTS: torch.tensor([True]),
        Field.RULE: 0,
        Field.VOTERS: torch.tensor(1),
        Field.UNUSABLE: torch.tensor(1, dtype=torch.int32),
        Field.STEPPED: True,
    }
    counts = Ballot(Reduction(Solo(), scaling_for(True, 1, 1.0)), facts).counts()
    assert {field for field in Field if counts[field]} == set(facts) - {Field.RULE}
    decision = decision_of(counts, 1, None)
    assert (decision.shared, decision.voters, decision.unusable) == (True, (0,), 1)
