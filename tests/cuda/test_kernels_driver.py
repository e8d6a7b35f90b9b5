"""The kernels as PyCUDA launches them on the simulated driver: the same bits as without it, and no report."""

from __future__ import annotations

import pytest

from tests.cuda.alone import open_machine
from tests.cuda.cases import Desk
from tests.cuda.driver.pool import Simulated
from tests.cuda.kernels_scenes import attend, case_of


@pytest.mark.parametrize("checked", [False, True], ids=["fast", "checked"])
@pytest.mark.parametrize(("k_type", "v_type", "head_size"), [("q8_0", "q4_0", 64), ("f16", "iq4_nl", 128)])
def test_the_kernels_under_pycuda(request: pytest.FixtureRequest, simulated: Simulated, k_type: str, v_type: str,
                                  head_size: int, checked: bool) -> None:
    machine = open_machine(request.config, checked=False)
    case = case_of(k_type, v_type, head_size, 1)
    expected = Desk(machine, case).table(case.all_at_once()).tobytes()
    assert simulated.call(attend, k_type, v_type, head_size, 1, kernels="kv", checked=checked) == [expected, expected]
