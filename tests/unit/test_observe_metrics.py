import re
import urllib.request

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from stoker.errors import BadInput
from stoker.observe import catalogue
from stoker.observe.metrics import Metrics, start_endpoint


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, labels)


def test_names_follow_the_rules() -> None:
    names = [metric.name for metric in catalogue.METRICS]
    assert len(set(names)) == len(names) > 30
    for metric in catalogue.METRICS:
        assert re.fullmatch(r"stoker_[a-z_]+", metric.name)
        assert metric.name.endswith("_total") == isinstance(metric, catalogue.CounterMetric)
        assert metric.help.endswith(".")
        assert metric.where
        assert not {"rollout", "run", "action", "task"} & set(metric.labels), "ids are no labels"


def test_what_the_first_form_promises_is_in_the_catalogue() -> None:
    promised = """stoker_lane_active_seconds_total stoker_inference_batch_calls
        stoker_ready_rollouts stoker_queue_age_seconds stoker_worker_busy_share
        stoker_execution_seconds stoker_faults_total stoker_retries_total stoker_action_seconds
        stoker_boxes_alive stoker_boxes_leaked stoker_outcomes_total
        stoker_admission_target_rollouts stoker_loop_lag_seconds"""
    assert set(promised.split()) <= {metric.name for metric in catalogue.METRICS}


def test_each_kind_records() -> None:
    metrics = Metrics()
    metrics.add(catalogue.OUTCOMES, outcome="completed")
    metrics.add(catalogue.LANE_TOKENS, 12)
    metrics.set(catalogue.QUEUE_AGE_SECONDS, 1.5, worker_class="fast")
    metrics.observe(catalogue.INFERENCE_BATCH, 3)
    assert value(metrics.registry, "stoker_outcomes_total", outcome="completed") == 1
    assert value(metrics.registry, "stoker_lane_tokens_total") == 12
    assert value(metrics.registry, "stoker_queue_age_seconds", worker_class="fast") == 1.5
    assert value(metrics.registry, "stoker_inference_batch_calls_bucket", le="4.0") == 1
    assert value(metrics.registry, "stoker_inference_batch_calls_bucket", le="2.0") == 0


def test_totals_counted_elsewhere_survive_a_restart_of_their_counter() -> None:
    metrics = Metrics()
    for total in (5, 5, 9, 2):
        metrics.total(catalogue.OUTCOMES, total, outcome="completed")
    metrics.total(catalogue.OUTCOMES, 1, outcome="failed")
    assert value(metrics.registry, "stoker_outcomes_total", outcome="completed") == 11
    assert value(metrics.registry, "stoker_outcomes_total", outcome="failed") == 1


def test_a_wrong_label_is_a_bug_of_ours() -> None:
    with pytest.raises(AssertionError, match="has the labels"):
        Metrics().set(catalogue.QUEUED_ACTIONS, 1, klass="fast")


def test_the_endpoint_serves_on_loopback_and_stops() -> None:
    metrics = Metrics()
    metrics.set(catalogue.BOXES_LEAKED, 0)
    endpoint = start_endpoint(metrics, 0)
    with urllib.request.urlopen(endpoint.url, timeout=10) as reply:
        families = {family.name for family in text_string_to_metric_families(reply.read().decode())}
    assert {"stoker_boxes_leaked", "stoker_lane_tokens"} <= families
    with pytest.raises(BadInput, match=r"observe\.metrics_port"):
        start_endpoint(metrics, endpoint.port)
    endpoint.close()
    start_endpoint(metrics, endpoint.port).close()
