"""Real processes over shared memory: what only processes can show: deaths, exits, forks, idleness, TCP."""

from __future__ import annotations

import signal

import pytest

from tests.runtime.programs import processes as programs
from tests.worlds import HANGS_SECONDS, NUMPY, TORCH, Processes, over_tcp, processes


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_collectives(size: int) -> None:
    processes(size, programs.collectives, size)


def test_ranks_of_a_machine_that_reorders_stores_share_a_fence() -> None:
    processes(3, programs.ranks_of_a_machine_that_reorders_stores_share_a_fence)


def test_without_a_launcher_it_is_size_one() -> None:
    (ended,) = processes(1, programs.without_a_launcher_it_is_size_one)
    assert ended.stdout == "0 1 1 1 [4] True\n" and ended.stderr == ""


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_killed_rank_is_named_by_all_others(victim: int) -> None:
    with Processes(3, programs.loop) as world:
        world.wait_for(victim, "running")
        world.kill(victim, signal.SIGKILL)
        for ended in world.wait(HANGS_SECONDS):
            if ended.rank == victim:
                assert ended.code == -signal.SIGKILL
            else:
                assert ended.code == 1, ended
                assert f"PeerLostError: rank {victim} was lost" in ended.stderr


@pytest.mark.parametrize("origin", [0, 1])
def test_an_exception_travels_with_its_traceback(origin: int) -> None:
    with Processes(3, programs.an_exception_travels_with_its_traceback, origin,
                   environment={"HVDLITE_FULL_TRACEBACKS": "1"}) as world:
        for ended in world.wait(HANGS_SECONDS):
            assert ended.code == 1
            assert "in prepare_batch" in ended.stderr and "no such column" in ended.stderr
            if ended.rank != origin:
                assert f"PeerFailedError: rank {origin} failed with KeyError" in ended.stderr


# docs/protocol.md#detection
def test_a_death_is_seen_although_a_forked_worker_holds_every_socket() -> None:
    with Processes(2, programs.a_death_is_seen_although_a_forked_worker_holds_every_socket) as world:
        world.wait_for(1, "ForkedProcessError")
        world.kill(1, signal.SIGKILL)
        world.ranks[0].wait(HANGS_SECONDS)
        assert "rank 1 was lost" in world.told(0).stderr


# docs/protocol.md#one-runtime
def test_forked_workers_and_their_own_forks_leave_the_job_alone() -> None:
    processes(2, programs.forked_workers_and_their_own_forks_leave_the_job_alone)


@pytest.mark.parametrize("plane", ["shm", "gloo"])
def test_forked_workers_that_shut_down_and_end_normally_leave_the_job_alone(plane: str) -> None:
    if plane == "gloo":
        pytest.importorskip("torch")
    processes(2, programs.forked_workers_that_shut_down_and_end_normally_leave_the_job_alone, timeout=120,
              environment={"HVDLITE_CPU_OPERATIONS": plane}, imported=TORCH if plane == "gloo" else NUMPY)


def test_a_rank_that_dies_before_init_is_named_by_the_others() -> None:
    with Processes(3, programs.a_rank_that_dies_before_init_is_named_by_the_others,
                   environment={"HVDLITE_START_TIMEOUT": "2"}) as world:
        ended = world.wait(HANGS_SECONDS)
        assert [rank.code for rank in ended] == [1, 7, 1]
        text = ended[0].stderr + ended[2].stderr
        assert text.count("ranks [1] did not connect") == 1 and "admission.py" not in text
        assert text.count("with the same LaunchError as another rank") + text.count("with the same MissingRanks") == 1
        assert text.count("in a_rank_that_dies_before_init_is_named_by_the_others") == 2, "the script's own frame, of each"


def test_an_init_that_fails_is_told_whole_with_full_tracebacks() -> None:
    with Processes(1, programs.init, environment={"HVDLITE_FULL_TRACEBACKS": "1", "HVDLITE_RANK": "5"}) as world:
        assert "api.py" in world.wait(HANGS_SECONDS)[0].stderr


def test_ranks_end_in_any_order_without_noise() -> None:
    for ended in processes(3, programs.ranks_end_in_any_order_without_noise):
        assert ended.stderr == ""
        assert ended.rank == 0 or ended.stdout.startswith("'late' needs all ranks, but rank")
        assert ended.rank == 0 or (" 0" in ended.stdout and "left the job normally" in ended.stdout)


# docs/protocol.md#waiting
def test_an_idle_job_uses_no_processor_time() -> None:
    for ended in processes(2, programs.an_idle_job_uses_no_processor_time):
        assert ended.result < 0.005, "an idle rank must not poll"


def test_init_and_shutdown_again_leak_nothing() -> None:
    processes(1, programs.init_and_shutdown_again_leak_nothing)


def test_the_control_plane_over_tcp() -> None:
    processes(3, programs.the_control_plane_over_tcp, environment=over_tcp())


def test_a_death_over_tcp() -> None:
    with Processes(2, programs.loop, environment=over_tcp()) as world:
        world.wait_for(1, "running")
        world.kill(1)
        assert "rank 1 was lost" in world.wait(HANGS_SECONDS)[0].stderr


@pytest.mark.parametrize(("environment", "told"), [
    ({"HVDLITE_FUSION_TRESHOLD": "1"}, "did you mean HVDLITE_FUSION_THRESHOLD"),
    ({"HVDLITE_FUSION_THRESHOLD": "lots"}, "HVDLITE_FUSION_THRESHOLD='lots' is not valid"),
    ({"HVDLITE_RANK": "5"}, "rank 5 is not in 0..0"),
    ({"HVDLITE_RANK": "x"}, "HVDLITE_RANK='x' is not a number"),
])
def test_a_bad_environment_is_one_clear_error(environment: dict[str, str], told: str) -> None:
    with Processes(1, programs.init, environment=environment) as world:
        (ended,) = world.wait(HANGS_SECONDS)
        assert ended.code == 1 and told in ended.stderr.splitlines()[-1]


def test_a_job_directory_open_to_others_is_refused(tmp_path) -> None:  # type: ignore[no-untyped-def]
    tmp_path.chmod(0o755)
    with Processes(2, programs.init, environment={"HVDLITE_JOB_DIRECTORY": str(tmp_path)}) as world:
        text = "".join(ended.stderr for ended in world.wait(HANGS_SECONDS))
        assert text.count("mode 0700") == 1 and text.count("with the same LaunchError as another rank") == 1


@pytest.mark.slow
@pytest.mark.parametrize("count", [6_000, pytest.param(60_000, marks=pytest.mark.long)])
def test_many_small_collectives_leave_nothing_behind(count: int) -> None:
    processes(2, programs.many_small_collectives_leave_nothing_behind, count, timeout=170)


def test_numpys_grouped_calls_and_the_story_of_a_tensor() -> None:
    ended = processes(2, programs.numpys_grouped_calls_and_the_story_of_a_tensor, environment={"HVDLITE_LOG_HIDE_TIME": "1"})
    assert [rank.stderr for rank in ended] == ["[0] hvdlite WARNING: hello\n", "[1] hvdlite WARNING: hello\n"]
