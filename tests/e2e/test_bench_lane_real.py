"""A closed batch of the simulator as a real run: it takes no less, since nothing is free there."""

from stoker.cli.bench_lane_real import real_and_simulated
from stoker.inference.profile import SimProfile
from stoker.testing.simulator.trace import Shape, constant

DEVICE = SimProfile(policy="scripted:none", a=0.02, c=0.02, window=4)
SHAPE = Shape(prompt=(1, 1), turns=(3, 3), sampled=(1, 1), observed=(1, 1))


def test_a_real_run_takes_at_least_what_its_simulation_takes() -> None:
    real, simulated = real_and_simulated(DEVICE, SHAPE, constant(0.1), rollouts=8, seed=1)
    assert simulated > 3 * (0.1 + 0.04), "three turns and waits after one another"
    assert real >= simulated * 0.999
