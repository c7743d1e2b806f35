import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from stoker.config.classes import WorkerClassSettings
from stoker.config.load import load_settings
from stoker.config.tree import Settings
from stoker.coordinator.actions import ActionFactory
from stoker.errors import ConfigInvalid
from stoker.journal.artifacts import ArtifactStore
from stoker.model.execution import Baseline, Credential, Destination
from stoker.model.tools import OpenRequest
from stoker.model.value import canonical_bytes
from stoker.rollout.arguments import EnvironmentArguments

TOML = """\
[workers]
count = 2                # a comment with "quotes" and = [brackets

[workers.classes.tests]
limits = { memory = "1GiB", cpu = "5m" }
note_free = 1
"""


def refusal(file: Path | None = None, *, sets: tuple[str, ...] = (), **environ: str) -> str:
    with pytest.raises(ConfigInvalid) as caught:
        load_settings([file] if file else [], environ, sets)
    assert "\n" not in caught.value.message
    return caught.value.message


def written(folder: Path, text: str) -> Path:
    file = folder / "stoker.toml"
    file.write_text(text)
    return file


def test_nothing_given_is_the_defaults() -> None:
    resolved = load_settings()
    assert resolved.settings == Settings()
    assert set(resolved.origins.values()) == {"default"}


def test_each_layer_wins_over_the_one_before_and_origins_say_which(tmp_path: Path) -> None:
    file = written(tmp_path, "[run]\nseed = 1\ngroup_size = 2\n\n[ledger]\nlease = '5s'\n")
    resolved = load_settings(
        [file], {"STOKER_RUN__SEED": "2", "STOKER_LEDGER__LEASE": "7s"}, ["run.seed=3"]
    )
    assert (resolved.settings.run.seed, resolved.settings.run.group_size) == (3, 2)
    assert resolved.settings.ledger.lease == 7.0
    assert resolved.origins["run.seed"] == "--set"
    assert resolved.origins["run.group_size"] == f"{file}:3"
    assert resolved.origins["ledger.lease"] == "STOKER_LEDGER__LEASE"
    assert resolved.origins["lane.retries"] == "default"


def test_a_part_of_a_default_class_can_be_set_and_the_rest_stays() -> None:
    resolved = load_settings(environ={"STOKER_WORKERS__CLASSES__FAST__SLOTS": "4"})
    fast = resolved.settings.workers.classes["fast"]
    assert fast == Settings().workers.classes["fast"].model_copy(update={"slots": 4})


@pytest.mark.parametrize(
    "host", ["*.pypi.org", "https://pypi.org", "pypi.org:443", "", "pypi org", "-x.org", "a..b"]
)
def test_a_destination_is_one_host(host: str) -> None:
    told = refusal(sets=(f"workers.classes.fast.network=[{{host='{host}'}}]",))
    assert "workers.classes.fast.network" in told
    assert "no host" in told


def test_a_credential_is_for_one_listed_destination() -> None:
    def class_with(*hosts: str) -> str:
        named = ", ".join(f"{{variable='T', host='{host}', file='/secret'}}" for host in hosts)
        return f"workers.classes.fast={{network=[{{host='api.example'}}], credentials=[{named}]}}"

    found = load_settings(sets=[class_with("API.example.")]).settings.workers.classes["fast"]
    assert found.policy(accept_shared_kernel=True).credentials == (
        Credential(variable="T", host="api.example", file="/secret"),
    )
    assert "none of the destinations" in refusal(sets=(class_with("other.example"),))
    assert "two credentials" in refusal(sets=(class_with("api.example", "api.example"),))


def test_a_class_that_reaches_outside_says_so() -> None:
    def fast(text: str) -> WorkerClassSettings:
        return load_settings(sets=[f"workers.classes.fast={{{text}}}"]).settings.workers.classes[
            "fast"
        ]

    outward = fast("network=[{host='PyPI.org.'}]")
    assert outward.policy(accept_shared_kernel=True).network == (Destination(host="pypi.org"),)
    assert outward.reaches_outside
    assert fast("mounts=[{source='/d', target='/d', writable=true}]").reaches_outside
    assert not fast("mounts=[{source='/d', target='/d'}]").reaches_outside


def test_a_new_class_stands_beside_the_default_one(tmp_path: Path) -> None:
    file = written(tmp_path, "[workers.classes.tests]\n[workers.classes.slow]\ntimeout = 9\n")
    resolved = load_settings([file], sets=["workers.classes.slow={slots=1, isolation='process'}"])
    classes = resolved.settings.workers.classes
    assert sorted(classes) == ["fast", "slow", "tests"]
    assert (classes["slow"].timeout, classes["slow"].slots) == (9.0, 1)


def test_an_empty_table_takes_nothing_away(tmp_path: Path) -> None:
    resolved = load_settings([written(tmp_path, "[workers]\n[workers.classes]\n")])
    assert resolved.settings == Settings()


def test_mounts_come_from_an_array_of_tables(tmp_path: Path) -> None:
    text = '[[workers.classes.fast.mounts]]\nsource = "/a"\ntarget = "/b"\n'
    resolved = load_settings([written(tmp_path, text)])
    (mount,) = resolved.settings.workers.classes["fast"].mounts
    assert (mount.source, mount.target, mount.writable) == ("/a", "/b", False)


def test_plain_text_settings_take_what_looks_like_a_number_literally() -> None:
    resolved = load_settings(sets=["sandbox.baselines.python.environment.A=007"])
    assert resolved.settings.sandbox.baselines["python"].environment == {"A": "007"}


def test_the_digest_follows_values_not_origins() -> None:
    one = load_settings(sets=["run.seed=3"])
    other = load_settings(environ={"STOKER_RUN__SEED": "3"})
    assert one.digest == other.digest != load_settings().digest


def test_variables_without_two_underscores_are_left_alone() -> None:
    assert load_settings(environ={"STOKER_FAULT": "x", "STOKER_ACTION_KEY": "y"}).origins


def test_unknown_key_names_file_line_and_nearest(tmp_path: Path) -> None:
    message = refusal(written(tmp_path, "[workers]\n\ncuont = 2\n"))
    assert message == (
        f"{tmp_path}/stoker.toml:3: unknown setting workers.cuont; "
        "the nearest known one is workers.count."
    )


def test_unknown_key_after_strings_and_inline_tables_keeps_its_line(tmp_path: Path) -> None:
    assert "stoker.toml:6: unknown setting workers.classes.tests.note_free" in refusal(
        written(tmp_path, TOML)
    )


def test_right_name_in_the_wrong_place_says_where_it_lives() -> None:
    assert "workers.classes.NAME.slots" in refusal(sets=("slots=3",))


def test_unknown_section_lists_the_known_ones() -> None:
    assert "known here: admission, budget, lane" in refusal(sets=("foo.bar=1",))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("workers.count=two", 'is "two"; it must be a whole number.'),
        ("workers.count=99", "is 99; it must be at most 64."),
        ("workers.classes.fast.isolation=jail", "allowed: auto, process, namespace, container"),
        ("admission.mode=wild", 'is "wild"; allowed: adaptive, fixed.'),
        ("workers=5", "workers is 5; it must be a table."),
        ("run.seed.a=1", "the nearest known one is run.seed."),
        ("ledger.lease=5 parsecs", "write a number with one of ms, s, m, h, d"),
        ("ledger.lease=inf", "finite"),
        ("workers.call_class=nope", "none of ['fast']"),
        ("budget.money=3", "budget.money needs budget.token_price or budget.box_price"),
        ("budget.tokens=0", "budget.tokens is 0; it must be at least 1"),
        ("workers.classes.fast.service=web", "give it a rate: services.web.rate"),
        ("services.web.rate=0", "services.web.rate is 0; it must be"),
        ("services.web={rate=1, burst=0}", "services.web.burst is 0; it must be"),
        ("workers.classes.fast.by_ticket=true", "belongs to one worker"),
        ("sandbox.accept_shared_kernel=perhaps", "true or false"),
        ("workers.classes.fast.mounts=[{source='/a', target='/b', x=1}]", "mounts[0].x is no"),
        ("sandbox.baselines.repo.files=repo", 'is "repo"; it must be an absolute path.'),
        ("junk", "not of the form a.b=value"),
    ],
)
def test_an_unusable_value_says_what_was_given_and_what_is_allowed(
    given: str, expected: str
) -> None:
    assert expected in refusal(sets=(given,))


def test_a_mistyped_value_in_a_file_names_its_line(tmp_path: Path) -> None:
    text = '[run]\nseed = 1\n\n[workers.classes.fast]\nslots = "many"\n'
    assert refusal(written(tmp_path, text)).startswith(
        f"{tmp_path}/stoker.toml:5: workers.classes.fast.slots"
    )


def test_a_file_that_is_no_toml_names_the_line(tmp_path: Path) -> None:
    assert "stoker.toml:2: not TOML" in refusal(written(tmp_path, "[run]\nseed = \n"))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert "nowhere.toml cannot be read" in refusal(tmp_path / "nowhere.toml")


def test_single_underscores_are_answered_with_the_right_spelling() -> None:
    message = refusal(STOKER_WORKERS_COUNT="2")
    assert message.endswith("STOKER_WORKERS__COUNT.")


def test_an_unknown_variable_is_refused() -> None:
    assert refusal(STOKER_RUN__SEAD="2").startswith("STOKER_RUN__SEAD: unknown setting run.sead")


def test_a_program_may_pin_the_interpreter_in_the_name_of_the_baseline() -> None:
    sandbox = load_settings().settings.sandbox
    pinned = f"python-{sys.version_info.major}.{sys.version_info.minor}"
    assert sandbox.baseline(pinned) == sandbox.baseline("python") is not None
    assert sandbox.baseline("python-2.7") is None


def test_a_task_names_a_root_within_the_directory_that_is_configured() -> None:
    sets = ["sandbox.baselines.swe.roots=/srv/images", "sandbox.baselines.one.root=/srv/one.tar"]
    sandbox = load_settings(sets=sets).settings.sandbox
    found = sandbox.baseline("swe/astropy__astropy-12.1")
    assert found is not None
    assert found.root == "/srv/images/astropy__astropy-12.1"
    for name in ("swe", "swe/", "swe/..", "swe/.git", "swe/a/b", "swe/../one", "one/a", "python/a"):
        assert sandbox.baseline(name) is None, name
    assert sandbox.baseline("one") == sandbox.baselines["one"]
    both = ("sandbox.baselines.one.root=/a", "sandbox.baselines.one.roots=/b")
    assert "name one root, or a directory" in refusal(sets=both)


def test_a_class_names_the_baseline_of_programs_that_name_none(tmp_path: Path) -> None:
    said = refusal(sets=("workers.classes.fast.baseline=nope",))
    assert "workers.classes.fast.baseline is 'nope', which is none of ['python']" in said
    sets = ["workers.classes.fast.baseline=app", "sandbox.baselines.app.root=/srv/app.tar"]
    factory = ActionFactory(load_settings(sets=sets).settings, ArtifactStore(tmp_path))

    def asked(name: str) -> Baseline:
        arguments = canonical_bytes(EnvironmentArguments(baseline=name, worker_class=None))
        call = SimpleNamespace(arguments=arguments, path="0")
        opened = SimpleNamespace(worker_class="fast", saved=None)
        rollout = SimpleNamespace(environments={"0": opened})
        shape = factory._opening(rollout, call)  # type: ignore[arg-type]
        return msgspec.msgpack.decode(shape.input, type=OpenRequest).baseline

    pinned = f"python-{sys.version_info.major}.{sys.version_info.minor}"
    assert asked("python") == Baseline(name="app", root="/srv/app.tar")
    assert asked(pinned) == Baseline(name=pinned)
    with pytest.raises(ConfigInvalid, match="NAME/ONE"):
        asked("nope/x")


def test_memory_in_which_no_shell_starts_is_refused_by_its_field() -> None:
    said = refusal(sets=("workers.classes.fast.limits.memory=1KiB",))
    assert said.startswith('--set: workers.classes.fast.limits.memory is "1KiB"; it must be at lea')
    least = load_settings(sets=["workers.classes.fast.limits.memory=4MiB"]).settings
    assert least.workers.classes["fast"].limits.memory == 4 * 1024 * 1024


def test_a_class_nobody_defined_is_refused_with_the_known_ones() -> None:
    for name in ("call_class", "environment_class"):
        said = refusal(sets=(f"workers.{name}=nope", "workers.classes.tests={slots=1}"))
        assert f"{name} is 'nope', which is none of ['fast', 'tests']" in said
