"""`asyncrl check` and what a run looks at first: the same questions, the same refusals, the right numbers."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hub_server import hub_server
from model_folder import NUM_PARAMETERS, make_model_folder
from safetensors.numpy import save_file

from asyncrl.check import check
from asyncrl.config import Config, load_config
from asyncrl.errors import ConfigError, DataError
from asyncrl.launch import preflight, prepare, resources


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model_folder(tmp_path / "model")


def config_of(model: Path, *overrides: str) -> Config:
    return load_config(None, [f"model={model}", f"run.dir={model.parent}/runs", *overrides])


def run_prepare(config: Config, monkeypatch: pytest.MonkeyPatch) -> prepare.Prepared:
    """`prepare` with a model that is there already."""

    async def fetch_model(name: str, key: str = "model") -> Path:
        return Path(name)

    monkeypatch.setattr(prepare, "fetch_model", fetch_model)
    return asyncio.run(prepare.prepare(config))


ROWS = Path(__file__)


def texts(seed: int) -> list[dict[str, str]]:
    """Supervised rows of 0, 4 and 6 tokens: the model has no EOS token."""
    return [{"text": ""}, {"text": "abcd"}, {"text": "abcdef"}]


def test_check_says_how_many_supervised_rows_there_are_and_how_often_each_trains(model: Path):
    # Mutations: the prompts' rows for the supervised; one step a version; prompt tokens too (10).
    keys = [
        "algorithm.loss.ptx={coef: 0.1, rows_per_minibatch: 3}",
        "learner.minibatches=2",
        "learner.epochs=2",
    ]
    config = config_of(model, f"data.supervised={ROWS}:texts", "learner.max_versions=5", *keys)
    rows = dict(check(config))
    assert "2 rows from" in rows["supervised"]
    assert "8 tokens that train, 1 without a completion; at most 520 tokens a row" in rows["supervised"]
    shown = [value for _, value in check(config)]
    assert "0.1 x their cross entropy in every optimizer step, 3 rows each: 60 rows, 30.00 epochs" in shown


REFUSED = [
    (["stream.max_message_bytes=2000"], ["stream.max_message_bytes: 2000", "2880", "raise it"]),
    (["stream.max_message_bytes=46079"], ["stream.max_message_bytes: 46079", "46080", "one rank's share"]),
    (["weight_sync.dir=/no/such/folder"], ["weight_sync.dir", "/no/such/folder", "existing"]),
    (["data.max_prompt_tokens=2041"], ["max_prompt_tokens", "2049", "2048 positions"]),
    (["data.max_prompt_tokens=4"], ["rev4", "data.max_prompt_tokens 4", "shortest has 5"]),
    (["rollout.block_size=48"], ["rollout.block_size: 48", "multiple of 32", "use 64"]),
    (["rollout.engine_args={dtype: half}"], ["rollout.engine_args.dtype", "remove it"]),
    (["rollout.engine_args={weight_transfer_config: {}}"], ["engine_args.weight_transfer_config"]),
    (["resources.cores={learner: [4096]}"], ["resources.cores.learner", "4096"]),
    (["reward=exact_macth"], ["exact_macth", "exact_match"]),
    (["reward=[exact_match, exact_macth]"], ["exact_macth", "exact_match"]),
    (["reward=[exact_match, {name: gsm8k_strict, data_source: [x]}]"], ["gsm8k_strict", "data_source 'x'"]),
    (["reward={name: exact_match, data_source: [x]}"], ["no reward applies", "data_source ''"]),
    (["data.train=missing.jsonl"], ["missing.jsonl", "data.train"]),
    (["data.eval=[rev4, sort4]"], ["data.eval: rev4, sort4", "eval.every 0", "data.eval=null"]),
    (["data.answer_key=solution"], ["solution", "data.answer_key"]),
    (
        ["data.supervised=missing.jsonl", "algorithm.loss.ptx.coef=1"],
        ["missing.jsonl", "check data.supervised"],
    ),
    (["data.supervised=rev4", "algorithm.loss.ptx.coef=1"], ["rev4, row 0", "messages, or text"]),
    (
        [f"data.supervised={ROWS}:texts", "algorithm.loss.ptx.coef=1", "data.max_supervised_tokens=2049"],
        ["data.max_supervised_tokens = 2049", "2048 positions"],
    ),
    (
        [f"data.supervised={ROWS}:texts", "algorithm.loss.ptx.coef=1", "data.max_supervised_tokens=3"],
        ["none of 3 rows is left: 1 have no completion and 2 are longer than 3 tokens"],
    ),
    (["model=~/no-such-model"], ["model: '~/no-such-model' is not a folder", "a model of the Hub"]),
    (["model=models/of/mine"], ["model: 'models/of/mine' is not a folder"]),
    (["model=/tmp"], ["model: '/tmp' is a folder without config.json"]),
    (["run.name=model"], ["run.name", "exists already", "choose another"]),
    (
        ["algorithm.loss.policy=no_such_module:loss"],
        ["algorithm.loss.policy.function 'no_such_module:loss'", "ModuleNotFoundError"],
    ),
    (
        ["algorithm.advantages=json:no_such"],
        ["algorithm.advantages.function 'json:no_such'", "has no 'no_such'"],
    ),
    (
        ["algorithm.loss.policy={type: custom, function: 'json:detect_encoding', options: {strange: 1}}"],
        ["algorithm.loss.policy.function", "cannot be called as it will be, with (tokens, strange=1)"],
    ),
    (["algorithm.stages=[score, advantage, correct, 'json:x', loss, update]"], ["algorithm.stages 'json:x'"]),
    (
        ["algorithm.filter={keep: spread, metric: exact_mach}"],
        ["algorithm.filter.metric: 'exact_mach'", "'exact_match'"],
    ),
    (
        ["algorithm.loss.kl={}", "algorithm.reference.model=/no/model"],
        ["algorithm.reference.model: '/no/model'"],
    ),
    (
        ["algorithm=ppo", "algorithm.critic.model=/tmp"],
        ["algorithm.critic.model: '/tmp' is a folder without"],
    ),
]


@pytest.mark.parametrize(("overrides", "says"), REFUSED, ids=[" ".join(o) for o, _ in REFUSED])
def test_check_and_a_run_refuse_the_same_things_in_the_same_words(
    overrides: list[str], says: list[str], model: Path, monkeypatch: pytest.MonkeyPatch
):
    # Mutation: leave any of the questions out of check_config or check_model -> that case is not refused.
    if "run.name=model" in overrides:
        overrides = [*overrides, f"run.dir={model.parent}"]
    config = config_of(model, *overrides)
    with pytest.raises((ConfigError, DataError)) as checked:
        check(config)
    with pytest.raises((ConfigError, DataError)) as prepared:
        run_prepare(config, monkeypatch)
    assert str(checked.value) == str(prepared.value)
    for part in says:
        assert part in str(checked.value)


def test_a_reference_and_a_critic_must_read_the_policys_tokens(model: Path, monkeypatch: pytest.MonkeyPatch):
    # Mutations: do not look at models besides the policy; compare sizes of vocabularies alone.
    other = make_model_folder(model.parent / "other", max_positions=600)
    for keys in (
        ["algorithm.loss.kl={}", f"algorithm.reference.model={other}"],
        ["algorithm=ppo", f"algorithm.critic.model={other}"],
    ):
        key = keys[1].partition("=")[0]
        config = config_of(model, *keys)
        assert run_prepare(config, monkeypatch).device == "cpu"
        long = config_of(model, *keys, "data.max_prompt_tokens=593")
        for refuse in (check, lambda config: run_prepare(config, monkeypatch)):
            with pytest.raises(
                ConfigError, match=rf"^{key}: data\.max_prompt_tokens \+ .* = 601, and .*other has 600"
            ):
                refuse(long)
        tokenizer = (other / "tokenizer.json").read_text()
        (other / "tokenizer.json").write_text(tokenizer.replace('"a":', '"é":'))
        with pytest.raises(ConfigError, match=rf"^{key}: .*other has another vocabulary than"):
            check(config)
        (other / "tokenizer.json").write_text(tokenizer)


def test_check_counts_the_memory_of_every_model_that_a_rank_holds(model: Path):
    # Mutations: gradients and moments of a frozen reference; no critic, or one where the policy's body is shared;
    # moments of all weights where adapters are trained (1.6 MB), or none of the adapters (0.4 MB).
    block = {"model.layers.0.self_attn.q_proj.weight": np.zeros((250, 400), np.float32)}
    save_file(block, model / "block.safetensors")

    def memory(*overrides: str) -> dict[str, str]:
        rows = check(config_of(model, *overrides))
        return {what: said.partition(" of ")[0] for what, said in rows if what.endswith("memory")}

    assert memory() == {"learner memory": "1.6 MB"}
    assert memory("algorithm.loss.kl={}") == {"learner memory": "1.6 MB", "reference memory": "0.4 MB"}
    assert "reference memory" not in memory("algorithm.loss.kl={reference: proximal}")
    assert memory("algorithm=ppo")["critic memory"] == "1.6 MB"
    assert memory("algorithm=ppo", "learner.optimizer=sgd")["critic memory"] == "0.8 MB"
    assert "critic memory" not in memory("algorithm=ppo", "algorithm.critic.shared=true")
    # Mutations: copies of the model counted once; the embedding of a tensor group, which each rank has whole.
    save_file(
        block | {"model.embed_tokens.weight": np.zeros((50, 400), np.float32)}, model / "block.safetensors"
    )
    assert memory("learner.num_ranks=4")["learner memory"] == "1.9 MB"
    assert memory("learner.num_ranks=4", "learner.replicas=2")["learner memory"] == "3.8 MB"
    in_pairs = memory("learner.num_ranks=4", "learner.tensor_parallel_size=2", "algorithm.loss.kl={}")
    assert in_pairs == {"learner memory": "2.2 MB", "reference memory": "0.6 MB"}
    save_file(block, model / "block.safetensors")
    with_adapters = memory("algorithm.loss.kl={}", "learner.lora={rank: 16}")
    assert with_adapters["learner memory"] == "0.6 MB"
    assert with_adapters["reference memory"].startswith("none")


def test_heads_that_tensor_ranks_cannot_share_are_refused(model: Path):
    # Mutations: look at the policy alone; at num_attention_heads alone.
    def with_heads(folder: Path, heads: int, keys: int) -> None:
        sizes = {"num_attention_heads": heads, "num_key_value_heads": keys, "intermediate_size": 48}
        shape = json.loads((folder / "config.json").read_text()) | sizes
        (folder / "config.json").write_text(json.dumps(shape))

    four = ["learner.num_ranks=4", "learner.tensor_parallel_size=4"]
    with_heads(model, 8, 4)
    check(config_of(model, *four))
    with_heads(model, 8, 2)
    with pytest.raises(
        ConfigError, match=r"^learner\.tensor_parallel_size 4 does not divide num_key_value_heads 2 of"
    ):
        check(config_of(model, *four))
    with_heads(model, 8, 4)
    reference = make_model_folder(model.parent / "reference")
    with_heads(reference, 6, 4)
    with pytest.raises(
        ConfigError, match=r"^algorithm\.reference\.model: .* does not divide num_attention_heads 6 of"
    ):
        check(config_of(model, *four, "algorithm.loss.kl={}", f"algorithm.reference.model={reference}"))


@pytest.mark.parametrize("targets", ["q_prj", "q_proj, q_prj", "all-linear, q_proj", "lm_head"])
def test_an_adapter_on_a_layer_that_is_not_there_is_refused(
    targets: str, model: Path, monkeypatch: pytest.MonkeyPatch
):
    # Mutations: leave it to peft, which fails when all is loaded, or trains q_proj alone without a word; take the
    # head, whose merged rows nothing publishes.
    layers = {f"model.layers.0.self_attn.{n}_proj.weight": np.zeros((8, 8), np.float32) for n in "qk"}
    save_file(layers, model / "block.safetensors")
    wrong = next(target for target in targets.split(", ") if target != "q_proj")
    config = config_of(model, f"learner.lora.target_modules=[{targets}]")
    for refuse in (check, lambda config: run_prepare(config, monkeypatch)):
        with pytest.raises(ConfigError, match=rf"target_modules: '{wrong}' is no linear layer") as caught:
            refuse(config)
        assert str(caught.value).endswith(
            "; there are k_proj, q_proj, or [all-linear] alone, for all of them"
        )
    for right in ("q_proj", "self_attn.k_proj", "q_proj, k_proj", "all-linear"):
        check(config_of(model, f"learner.lora.target_modules=[{right}]"))


def test_check_names_the_options_that_are_not_the_recipes_own(model: Path):
    # Mutation: the recipe's name and stages alone, whatever is changed in it.
    def said(*overrides: str) -> list[str]:
        return [
            value for _, value in check(config_of(model, *overrides)) if value.startswith("not the recipe")
        ]

    assert said() == []
    assert said("algorithm.loss.policy.clip_high=0.3", "algorithm.loss.kl={}") == [
        "not the recipe's own: loss.policy.clip_high 0.3, loss.kl.coef 0.001, loss.kl.reference ref, loss.kl.estimator "
        "k3, loss.kl.gradient_of_k2 False, loss.kl.weight none"
    ]


def test_check_counts_the_bytes_of_a_checkpoint(model: Path):
    # Mutations: gradients counted; no critic; the frozen weights beneath adapters; one fewer than at the peak.
    block = {"model.layers.0.self_attn.q_proj.weight": np.zeros((250, 400), np.float32)}
    save_file(block, model / "block.safetensors")

    def said(*overrides: str) -> str:
        return dict(check(config_of(model, "checkpoint.every=5", *overrides)))["checkpoints"]

    assert said().startswith("every 5 versions 1.2 MB; with checkpoint.keep 3 at most 4.8 MB in ")
    of_two = said("algorithm=ppo", "checkpoint.keep=1")
    assert of_two.startswith("every 5 versions 2.4 MB; with checkpoint.keep 1 at most 4.8 MB in ")
    assert said("learner.lora={rank: 16}").startswith("every 5 versions 0.1 MB")
    assert dict(check(config_of(model)))["checkpoints"].startswith("none")


def test_a_port_in_use_is_refused_before_the_run_directory_is_made(
    model: Path, monkeypatch: pytest.MonkeyPatch
):
    # Mutation: the port first tried when the coordinator listens -> the run directory is there, and refuses the retry.
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        config = config_of(model, f"stream.port={taken.getsockname()[1]}", "run.name=retried")
        for refuse in (check, lambda config: run_prepare(config, monkeypatch)):
            with pytest.raises(ConfigError, match=r"stream\.port: \d+ is in use on 127\.0\.0\.1"):
                refuse(config)
    assert run_prepare(config, monkeypatch).device == "cpu"


def test_a_model_without_a_chat_template_is_named_before_anything_starts(
    model: Path, monkeypatch: pytest.MonkeyPatch
):
    # Mutation: the template looked for when the first prompt is leased.
    rows = model.parent / "rows.jsonl"
    rows.write_text('{"prompt": [{"role": "user", "content": "ab"}], "answer": "x"}\n')
    config = config_of(model, f"data.train={rows}")
    for refuse in (check, lambda config: run_prepare(config, monkeypatch)):
        with pytest.raises(DataError) as caught:
            refuse(config)
        for part in (f"{rows}, line 1", str(model), "no chat template", "chat_template.jinja"):
            assert part in str(caught.value)
    rows.write_text('{"prompt": "ab", "answer": "x"}\n')
    assert len(run_prepare(config, monkeypatch).dataset) == 1
    # Mutation: one advice for both -> told to make strings of what are strings.
    with pytest.raises(
        DataError, match=r"data\.as_chat makes the prompt a message.* or leave data\.as_chat out$"
    ):
        check(config_of(model, f"data.train={rows}", "data.as_chat=true"))


def test_snapshots_that_do_not_fit_are_refused_to_the_byte(model: Path, monkeypatch: pytest.MonkeyPatch):
    # [10, 8] takes 320 bytes and [7] 28, each rounded up to 64: 384, and two versions at once. Mutation: one
    # version, or no rounding -> 767 bytes would do.
    config = config_of(model)
    monkeypatch.setattr(preflight, "bytes_free", lambda folder: 768)
    assert run_prepare(config, monkeypatch).device == "cpu"
    monkeypatch.setattr(preflight, "bytes_free", lambda folder: 767)
    for refuse in (check, lambda config: run_prepare(config, monkeypatch)):
        with pytest.raises(ConfigError, match=r"weight_sync\.dir.* 767 bytes free .* need 768"):
            refuse(config)


@pytest.mark.parametrize(
    ("overrides", "device", "num_bytes"),
    [
        ([], "cpu", 768),
        ([], "cuda", 2 * (192 + 64)),
        (["learner.dtype=bfloat16"], "cpu", 2 * (192 + 64)),
        (["learner.dtype=bfloat16", "weight_sync.dtype=float32"], "cuda", 768),
    ],
)
def test_snapshot_bytes_follow_the_publish_dtype(
    overrides: list[str], device: str, num_bytes: int, model: Path
):
    # Mutation: ignore weight_sync.dtype, or the device under auto -> one of the cases is off by a factor.
    assert preflight.snapshot_bytes(config_of(model, *overrides), model, device) == num_bytes


def test_check_shows_the_numbers_that_the_config_amounts_to(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
):
    # Prompts of 3, 6 and 9 tokens with at most 6. Mutations: count the prompt once a trajectory (a group of
    # 88), leave out max_staleness + 1 (8 outstanding), count dropped rows as kept (3).
    rows = [{"prompt": "abc" * n, "answer": "x"} for n in (1, 2, 3)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr("asyncrl.launch.preflight.available_cores", lambda: [4, 5, 6, 7])
    config = config_of(
        model,
        f"data.train={data}",
        "data.max_prompt_tokens=6",
        "rollout.group_size=4",
        "rollout.max_completion_tokens=16",
        "rollout.max_groups_in_flight=3",
        "learner.prompts_per_batch=8",
        "learner.num_ranks=2",
        "learner.max_tokens_per_microbatch=150",
        "learner.max_versions=5",
        "max_staleness=1",
        "stream.port=4567",
    )
    shown = dict(check(config))
    assert shown["prompts"].startswith("2 kept from ")
    assert shown["prompts"].endswith("1 dropped as longer than 6 tokens; the longest kept has 6")
    assert shown["the run"] == "5 versions, 40 prompts, 20.00 epochs"
    assert shown["a batch"] == "8 prompts x 4 = 32 trajectories, at most 560 packed tokens"
    assert shown["a group"] == "at most 70 packed tokens (the prompt once)"
    assert shown["microbatches"] == "about 2 a rank at full length, of 150 tokens"
    assert shown["groups outstanding"].startswith("at most 16:")
    assert shown["groups in flight"].startswith("3 a server")
    assert shown["port"] == "127.0.0.1, 4567"
    assert shown["messages"].startswith("a group of at most 856 bytes, a rank's batch of 3424,")
    assert shown["model"].endswith(f": {NUM_PARAMETERS / 1e6:.2f} M parameters")
    assert shown["snapshots"].startswith("two at once: 0.0 MB in /dev/shm, ")
    assert (shown["learner-0"], shown["learner-1"]) == ("cores 6", "cores 7")
    assert shown["rollout-server-0"] == "cores 4,5"


def test_check_counts_the_epochs_of_the_source_that_is_drawn_most(tmp_path: Path, model: Path):
    # 60 versions x 16 = 960 prompts: 768 of one source's 4 rows, 192 of the other's 12. Mutation: 960 / 16 rows.
    for name, num_rows in (("few", 4), ("many", 12)):
        row = {"prompt": "ab", "answer": "x"}
        (tmp_path / f"{name}.jsonl").write_text((json.dumps(row) + "\n") * num_rows)
    weighted = f"data.train=[{{path: {tmp_path}/few.jsonl, weight: 4}}, {tmp_path}/many.jsonl]"
    end = "960 prompts, 192.00 epochs (of the source least drawn, 16.00)"
    assert dict(check(config_of(model, weighted)))["the run"].endswith(end)
    equal = f"data.train=[{tmp_path}/few.jsonl, {tmp_path}/many.jsonl]"
    assert dict(check(config_of(model, equal)))["the run"].endswith("960 prompts, 60.00 epochs")


def test_check_shows_each_process_with_its_own_gpus(model: Path, monkeypatch: pytest.MonkeyPatch):
    # Mutation: ask for the CPU's placement -> no GPUs are shown.
    monkeypatch.setattr(resources, "_num_gpus_present", lambda: 8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,3")
    shown = dict(check(config_of(model)))
    assert shown["learner-0"].endswith(", GPUs 5")
    assert shown["rollout-server-0"].endswith(", GPUs 3")


def test_the_cpu_rule_for_block_sizes_does_not_hold_on_a_gpu(model: Path, monkeypatch: pytest.MonkeyPatch):
    # Mutation: ask for a multiple of 32 everywhere -> 16, vLLM's default on a GPU, is refused.
    monkeypatch.setattr(resources, "_num_gpus_present", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert check(config_of(model, "rollout.block_size=16"))


def test_a_model_that_is_not_here_is_said_so_and_nothing_is_fetched(tmp_path: Path):
    # Mutation: call resolve_model whether or not it is ready -> it asks the Hub and fails.
    config = load_config(None, ["model=nobody/no-such-model", f"run.dir={tmp_path}"])
    shown = dict(check(config))
    assert shown["model"].startswith("nobody/no-such-model: not here yet")
    assert shown["prompts"].startswith("10000 from rev4")


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("model=owner/gone", "model"),
        ("algorithm={reference: {model: owner/gone}, loss: {kl: {coef: 0.1}}}", "algorithm.reference.model"),
        ("algorithm={type: ppo, critic: {model: owner/gone}}", "algorithm.critic.model"),
        ("reward=model:owner/gone", "reward"),
    ],
)
def test_check_refuses_a_name_that_the_hub_does_not_have(
    model: Path, monkeypatch: pytest.MonkeyPatch, override: str, key: str
):
    # Mutation: not asked of the models beside the policy.
    monkeypatch.setattr("asyncrl.models.source.hub_folder", lambda name, **options: None)
    monkeypatch.setattr("asyncrl.envs.reward_model.hub_folder", lambda name, **options: None)
    refusal = rf"^{key}: 'owner/gone' is not here, and the Hub .* \(it answers 404\); check the name"
    with hub_server(), pytest.raises(ConfigError, match=refusal):
        check(config_of(model, override))


def test_check_says_whether_the_hub_has_a_model_and_where_it_could_not_ask(model: Path):
    # Mutation: no answer taken for "no such model" -> nothing can be checked without a network.
    with hub_server():
        assert dict(check(config_of(model, "model=owner/there")))["model"].startswith(
            "owner/there: not here yet; the Hub has it; its sizes show"
        )
    assert dict(check(config_of(model, "model=owner/gone")))["model"].startswith(
        "owner/gone: not here yet, and not verified to exist: the Hub could not be asked (OfflineModeIsEnabled: "
    )


def test_a_reward_model_of_the_hub_is_brought_and_checked_before_anything_starts(
    model: Path, monkeypatch: pytest.MonkeyPatch
):
    config = config_of(model, "reward=model:owner/judge")
    judge = model.parent / "judge"
    asked: list[tuple[str, str]] = []

    def hub_folder(name: str, *, local_files_only: bool) -> Path | None:
        return judge if judge.is_dir() else None

    async def fetch_model(name: str, key: str = "model") -> Path:
        asked.append((name, key))
        if key == "reward":
            make_model_folder(judge)  # no classifier
        return Path(name)

    monkeypatch.setattr("asyncrl.envs.reward_model.hub_folder", hub_folder)
    monkeypatch.setattr(prepare, "fetch_model", fetch_model)
    assert dict(check(config))["reward"].startswith("owner/judge: not here yet")
    # Mutations: not fetched -> the rollout server asks the Hub, after a minute; not checked again once it is
    # here -> its folder is first looked at by the server's reward process.
    with pytest.raises(ConfigError, match=r"reward model:owner/judge: .*not a sequence classifier"):
        asyncio.run(prepare.prepare(config))
    assert asked == [("owner/judge", "reward")]
    with pytest.raises(ConfigError, match=r"reward model:owner/judge: .*not a sequence classifier"):
        check(config)


def test_a_reward_model_is_not_brought_to_a_node_without_rollout_servers(
    model: Path, monkeypatch: pytest.MonkeyPatch
):
    async def fetch_model(name: str, key: str = "model") -> Path:
        assert key == "model"
        return Path(name)

    monkeypatch.setattr("asyncrl.envs.reward_model.hub_folder", lambda name, **options: None)
    monkeypatch.setattr(prepare, "fetch_model", fetch_model)
    config = config_of(model, "reward=model:owner/judge")
    assert asyncio.run(prepare.prepare(config, start=("learner",))).model_path == model


@pytest.mark.parametrize("content", [None, b"\x02", b"\xff" * 64, b"\x02" + b"\0" * 7 + b"[]"])
def test_a_folder_without_readable_safetensors_is_refused(content: bytes | None, model: Path):
    # Mutation: count no files as no parameters -> "0.00 M parameters".
    file = model / "model.safetensors"
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match="safetensors"):
        check(config_of(model))


def test_check_of_a_ready_model_loads_neither_torch_nor_vllm(model: Path):
    # Mutation: import AutoTokenizer, or vllm_engine in preflight -> torch or vllm is loaded.
    program = (
        "import sys; from asyncrl.check import check; from asyncrl.config import load_config\n"
        f"check(load_config(None, ['model={model}']))\n"
        "print([name for name in ('torch', 'vllm') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout == "[]\n", done.stderr
