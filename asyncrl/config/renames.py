"""What the keys of other frameworks are called here, or what is done here without them: for the error that refuses one.

A key is looked up by its last two words, then by its last one: verl's `actor_rollout_ref.rollout.n` as `rollout.n`,
then as `n`.
"""

RENAMES: dict[str, str] = {
    # verl
    "train_files": "data.train",
    "val_files": "data.eval",
    "reward_fn_key": "data.source_key",
    "train_batch_size": "learner.prompts_per_batch",
    "max_prompt_length": "data.max_prompt_tokens",
    "max_response_length": "rollout.max_completion_tokens",
    "model.path": "model",
    "rollout.name": "rollout.engine, which is vllm",
    "rollout.n": "rollout.group_size",
    "n": "rollout.group_size",
    "val_kwargs.n": "eval.num_samples",
    "val_kwargs.temperature": "eval.temperature",
    "tensor_model_parallel_size": "rollout.tensor_parallel_size",
    "ppo_mini_batch_size": "learner.minibatches, train_batch_size / ppo_mini_batch_size",
    "ppo_epochs": "learner.epochs",
    "ppo_max_token_len_per_gpu": "learner.max_tokens_per_microbatch",
    "ppo_micro_batch_size_per_gpu": "learner.max_tokens_per_microbatch, in tokens",
    "log_prob_micro_batch_size_per_gpu": "learner.max_tokens_per_microbatch, in tokens",
    "log_prob_max_token_len_per_gpu": "learner.max_tokens_per_microbatch",
    "lr_warmup_steps": "learner.warmup_versions",
    "lr_warmup_steps_ratio": "learner.warmup_versions, in versions",
    "grad_clip": "learner.max_grad_norm",
    "clip_ratio": "algorithm.clip_low and algorithm.clip_high",
    "clip_ratio_low": "algorithm.clip_low",
    "clip_ratio_high": "algorithm.clip_high",
    "adv_estimator": "algorithm",
    "norm_adv_by_std_in_grpo": "algorithm.scale, std or none",
    "custom_reward_function.path": "reward",
    "total_training_steps": "learner.max_versions",
    "test_freq": "eval.every",
    "logger": "run.trackers",
    "project_name": "run.project",
    "experiment_name": "run.name",
    "default_local_dir": "run.dir",
    "max_off_policy_threshold": "max_staleness, one less",
    "staleness_threshold": "max_staleness, in versions",
    # TRL
    "num_generations": "rollout.group_size",
    "max_completion_length": "rollout.max_completion_tokens",
    "per_device_train_batch_size": "learner.prompts_per_batch, in prompts of the whole batch",
    "gradient_accumulation_steps": "learner.prompts_per_batch, in prompts of the whole batch",
    "steps_per_generation": "learner.minibatches, steps_per_generation / gradient_accumulation_steps",
    "num_iterations": "learner.epochs",
    "max_steps": "learner.max_versions, each of minibatches x epochs steps",
    "learning_rate": "learner.lr",
    "warmup_steps": "learner.warmup_versions",
    "warmup_ratio": "learner.warmup_versions, in versions",
    "optim": "learner.optimizer, adamw or sgd",
    "adam_beta1": "learner.betas, a list of both",
    "adam_beta2": "learner.betas, a list of both",
    "epsilon": "algorithm.clip_low and algorithm.clip_high",
    "epsilon_high": "algorithm.clip_high",
    "scale_rewards": "algorithm.scale, std or none",
    "reward_funcs": "reward",
    "reward_weights": "reward, a weight in each table",
    "eval_steps": "eval.every",
    "num_generations_eval": "eval.num_samples",
    "report_to": "run.trackers",
    "output_dir": "run.dir",
    "vllm_gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "vllm_tensor_parallel_size": "rollout.tensor_parallel_size",
    "vllm_importance_sampling_correction": "algorithm.correction, tis or none",
    "vllm_importance_sampling_clip_max": "algorithm.correction.cap",
    "vllm_importance_sampling_cap": "algorithm.correction.cap",
    # OpenRLHF
    "pretrain": "model",
    "prompt_data": "data.train",
    "prompt_max_len": "data.max_prompt_tokens",
    "generate_max_len": "rollout.max_completion_tokens",
    "n_samples_per_prompt": "rollout.group_size",
    "rollout_batch_size": "learner.prompts_per_batch",
    "vllm_num_engines": "rollout.num_servers",
    "actor_learning_rate": "learner.lr",
    "max_norm": "learner.max_grad_norm",
    "max_epochs": "learner.epochs",
    "eps_clip": "algorithm.clip_low and algorithm.clip_high",
    # AReaL, prime-rl
    "max_head_offpolicyness": "max_staleness",
    "max_off_policy_steps": "max_staleness",
}
"""Key -> the key here. What stands behind a comma tells how the value differs."""

_GROUPS = {
    # the objective
    "there is no KL term and no reference model yet, as with a coefficient of 0": (
        "use_kl_loss kl_loss_coef kl_loss_type use_kl_in_reward kl_penalty kl_ctrl kl_coef init_kl_coef "
        "kl_estimator ref sync_ref_model"
    ),
    "there is no KL term yet, as with TRL's default of 0 (AdamW's decay rates are learner.betas)": "beta",
    "there is no entropy term yet, as with a coefficient of 0": (
        "entropy_coeff entropy_coef entropy_loss_coef use_adaptive_entropy"
    ),
    "the loss is the mean over a mini-batch's trained tokens, which is verl's token-mean and TRL's dapo": (
        "loss_agg_mode loss_type"
    ),
    "each token has its own ratio, clipped by algorithm.clip_low and algorithm.clip_high": (
        "loss_mode policy_loss_type importance_sampling_level"
    ),
    "the ratio has no second bound, such as verl's where the advantage is negative": "clip_ratio_c dual_clip delta",
    "there is no critic: advantages compare the completions of one prompt": (
        "critic gamma lam lambd value_clip critic_warmup critic_pretrain critic_learning_rate"
    ),
    "groups whose rewards are all equal stay in their batch, with advantages of 0": (
        "filter_groups dynamic_filtering"
    ),
    "a completion that rollout.max_completion_tokens cuts off trains like any other": "mask_truncated_completions",
    # the course of a run
    "the data is gone through until learner.max_versions are trained, and asyncrl check says how often that is": (
        "total_epochs num_train_epochs num_episodes"
    ),
    "the learning rate stays what it is after learner.warmup_versions": (
        "lr_scheduler_type lr_scheduler warmup_style min_lr_ratio"
    ),
    "there are no checkpoints yet: the last version is written when the run ends": (
        "save_freq save_steps save_strategy save_total_limit resume_mode resume_from_path resume_from_checkpoint "
        "max_actor_ckpt_to_keep ckpt_path load_checkpoint max_ckpt_num"
    ),
    "every epoch is shuffled anew, by seed": "shuffle shuffle_dataset",
    "prompts longer than data.max_prompt_tokens are always dropped, counted and shown": (
        "truncation filter_overlong_prompts"
    ),
    "eval.every alone says when evaluations are, and version 0 always has one": (
        "val_before_train eval_on_start eval_strategy do_eval"
    ),
    "an evaluation takes every row of data.eval, or the first eval.max_prompts": (
        "val_batch_size per_device_eval_batch_size"
    ),
    "every version's numbers are shown and written to metrics.jsonl": "logging_steps logging_strategy",
    # processes, devices, memory
    "vLLM always generates": "use_vllm",
    "generation always runs beside training, and max_staleness bounds how old a trained token may be": (
        "rollout.mode async_train"
    ),
    "rollout servers are processes of their own and share no GPU with the learner": (
        "vllm_mode vllm_enable_sleep vllm_enable_sleep_mode free_cache_engine hybrid_engine colocate_all_models"
    ),
    "rollout servers connect to the learner: asyncrl rollout-server CONFIG --connect HOST:PORT": (
        "vllm_server_host vllm_server_port vllm_server_base_url"
    ),
    "of the GPUs that are visible the first learner.num_ranks are the learner's, and each of rollout.num_servers gets "
    "the next rollout.tensor_parallel_size": "n_gpus_per_node actor_num_gpus_per_node",
    "a run is on one node, the one that it is started on": "nnodes actor_num_nodes",
    "learner.dtype is bfloat16 on a GPU and float32 on a CPU unless it is set, and float16 is not built": "bf16 fp16",
    "activations are kept, not recomputed, and learner.max_tokens_per_microbatch bounds their memory": (
        "gradient_checkpointing enable_gradient_checkpointing"
    ),
    "FSDP2 shards the learner over learner.num_ranks and offloads nothing": (
        "fsdp fsdp_config fsdp_size deepspeed zero_stage param_offload optimizer_offload offload_policy adam_offload"
    ),
    "a sequence is whole on one rank": "ulysses_sequence_parallel_size ring_attn_size",
    "sequences are always packed without padding, up to learner.max_tokens_per_microbatch": (
        "use_remove_padding packing_samples use_dynamic_bsz use_dynamic_batch"
    ),
    "all weights are trained, and adapters are not built": "lora_rank lora_alpha lora_dropout target_modules use_peft",
    "the engine's longest sequence is data.max_prompt_tokens and the longest completion together": (
        "max_model_len vllm_max_model_length"
    ),
}

ABSENT: dict[str, str] = {key: said for said, keys in _GROUPS.items() for key in keys.split()}
"""Key without a counterpart -> what is done here, or what is not built and what that amounts to. docs/migrating.md has
the same."""
