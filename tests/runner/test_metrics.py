"""`--metrics`: what Prometheus reads, and clients that would hold up others or the job."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import pytest

from hvdlite.diagnostics.progress import Reading
from hvdlite_runner.cli import main
from hvdlite_runner.messages import ProgressReply, Sample
from hvdlite_runner.reports.metrics import MetricsServer, metrics_text
from hvdlite_runner.reports.record import Recorder
from tests.runner.test_records import ask, sample


def test_metrics_in_prometheus_format() -> None:
    text = metrics_text(2, {1: sample(4, 0.5), 0: Sample(Reading(), 7)}, None)
    families = text.split("# HELP ")[1:]
    assert families[0] == ("hvdlite_world number of the world; each change of an elastic job begins another\n"
                           "# TYPE hvdlite_world gauge\nhvdlite_world 2\n")
    found = {each.split()[0]: [line for line in each.splitlines() if line.startswith("hvdlite")][1:] for each in families}
    assert found["hvdlite_samples_total"] == ['hvdlite_samples_total{rank="0"} 0', 'hvdlite_samples_total{rank="1"} 32']
    assert found["hvdlite_waits_seconds_total"][1] == 'hvdlite_waits_seconds_total{rank="1"} 0.5'
    assert found["hvdlite_last_step_age_seconds"] == ['hvdlite_last_step_age_seconds{rank="0"} +Inf',
                                                      'hvdlite_last_step_age_seconds{rank="1"} 0.1']
    assert found["hvdlite_memory_bytes"][0] == 'hvdlite_memory_bytes{rank="0"} 7' and not found["hvdlite_slow_ratio"]
    assert all(f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}\n" in text for name in found)


def port_of(server: MetricsServer) -> int:
    return int(server.url.rpartition("/")[0].rpartition(":")[2])


def test_the_server_answers_get_of_one_path_only() -> None:
    server = MetricsServer("0")
    recorder = Recorder(["x"], None, server)
    recorder.begin_world({0: "a"})
    recorder.take("localhost", ProgressReply({0: sample(4)}))
    assert server.url.startswith("http://127.0.0.1:")
    status, kind, text = ask(port_of(server))
    assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8") and 'steps_total{rank="0"} 4\n' in text
    assert ask(port_of(server), "/")[0] == 404
    assert [ask(port_of(server), method=each)[0] for each in ("POST", "HEAD", "DELETE")] == [405] * 3
    recorder.closed(0)
    with pytest.raises(ConnectionRefusedError):
        ask(port_of(server))


def test_ports_that_cannot_be_used(capfd: pytest.CaptureFixture[str]) -> None:
    server = MetricsServer("127.0.0.1:0")
    for address, why in ((str(port_of(server)), "Address already in use"), ("x", "this is not PORT"),
                         ("99999", "this is not"), ("192.0.2.1:0", "Cannot assign")):
        assert main(["-np", "1", "--metrics", address, "true"]) == 2
        assert f"--metrics {address}: {why}" in capfd.readouterr().err
    server.close()


def test_a_slow_client_holds_up_neither_others_for_long_nor_the_end() -> None:
    server = MetricsServer("127.0.0.1:0")
    with socket.create_connection(("127.0.0.1", port_of(server))) as slow:
        slow.sendall(b"GET /met")
        assert ask(port_of(server))[0] == 200, "after the slow client's time"
        slow.close()
    with socket.create_connection(("127.0.0.1", port_of(server))):
        server.close()


def test_a_client_that_drips_is_left_in_time() -> None:
    server, is_over = MetricsServer("127.0.0.1:0"), threading.Event()
    with socket.create_connection(("127.0.0.1", port_of(server))) as slow:
        def drip() -> None:
            with contextlib.suppress(OSError):
                while not is_over.wait(0.2):
                    slow.sendall(b"G")

        thread = threading.Thread(target=drip)
        thread.start()
        time.sleep(0.3)
        begun = time.monotonic()
        try:
            assert ask(port_of(server))[0] == 200 and time.monotonic() - begun < 15
        finally:
            is_over.set()
            thread.join()
    server.close()
