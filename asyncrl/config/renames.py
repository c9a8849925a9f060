"""What the keys of other frameworks are called here, or what is done here without them: for the error that refuses one.

A key is looked up by its last three words, its last two, its last one: verl's `actor_rollout_ref.rollout.n` as
`rollout.n`, then as `n`.
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
    "clip_ratio": "algorithm.loss.policy.clip_low and algorithm.loss.policy.clip_high",
    "clip_ratio_low": "algorithm.loss.policy.clip_low",
    "clip_ratio_high": "algorithm.loss.policy.clip_high",
    "clip_ratio_c": "algorithm.loss.policy.dual_clip",
    "loss_mode": "algorithm.loss.policy, by name",
    "loss_agg_mode": "algorithm.loss.aggregation.mode",
    "loss_scale_factor": "algorithm.loss.aggregation.length",
    "entropy_coeff": "algorithm.loss.entropy.coef",
    "use_kl_loss": "algorithm.loss.kl, a table where there is one",
    "kl_loss_coef": "algorithm.loss.kl.coef",
    "kl_loss_type": "algorithm.loss.kl.estimator, k1 (kl), abs, k2 (mse) or k3 (low_var_kl)",
    "use_kl_in_reward": "algorithm.kl_reward, a table where there is one",
    "kl_penalty": "algorithm.kl_reward.estimator, k1 (kl), abs, k2 (mse) or k3 (low_var_kl)",
    "kl_ctrl": "algorithm.kl_reward",
    "kl_ctrl.type": "algorithm.kl_reward.type",
    "kl_ctrl.kl_coef": "algorithm.kl_reward.coef",
    "kl_ctrl.target_kl": "algorithm.kl_reward.target",
    "kl_ctrl.horizon": "algorithm.kl_reward.horizon",
    "adv_estimator": "algorithm, a recipe (ppo for gae), or algorithm.advantages",
    "gamma": "algorithm.advantages.gamma",
    "lam": "algorithm.advantages.lam",
    "norm_adv_by_std_in_grpo": "algorithm.advantages.scale, std or none",
    "filter_groups": "algorithm.filter",
    "filter_groups.enable": "algorithm.filter.keep, spread",
    "filter_groups.metric": "algorithm.filter.metric",
    "max_num_gen_batches": "algorithm.max_filtered_batches",
    "overlong_buffer": "algorithm.shaping.overlong",
    "overlong_buffer.enable": "algorithm.shaping.overlong, a table where there is one",
    "overlong_buffer.len": "algorithm.shaping.overlong.buffer_tokens",
    "overlong_buffer.penalty_factor": "algorithm.shaping.overlong.factor",
    "rollout_correction": "algorithm.correction",
    "rollout_is": "algorithm.correction.weight.level",
    "rollout_is_threshold": "algorithm.correction.weight.upper",
    "rollout_rs": "algorithm.correction.rejections",
    "bypass_mode": "algorithm.correction.proximal, bypass",
    "tis_imp_ratio_cap": "algorithm.correction.weight.upper",
    "critic.model.path": "algorithm.critic.model",
    "critic.optim.lr": "algorithm.critic.lr",
    "critic.ppo_epochs": "algorithm.critic.epochs",
    "critic.cliprange_value": "algorithm.critic.loss.clip",
    "critic.loss_agg_mode": "algorithm.critic.loss.aggregation.mode",
    "critic_warmup": "algorithm.critic.warmup_versions",
    "lora_rank": "learner.lora.rank",
    "lora_alpha": "learner.lora.alpha",
    "target_modules": "learner.lora.target_modules",
    "use_peft": "learner.lora, a table where there are adapters",
    "enable_gradient_checkpointing": "learner.activation_checkpointing",
    "use_torch_compile": "learner.compile",
    "param_offload": "learner.offload",
    "optimizer_offload": "learner.offload",
    "offload_policy": "learner.offload",
    "custom_reward_function.path": "reward",
    "total_training_steps": "learner.max_versions",
    "test_freq": "eval.every",
    "save_freq": "checkpoint.every",
    "max_actor_ckpt_to_keep": "checkpoint.keep",
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
    "save_steps": "checkpoint.every, in versions",
    "save_total_limit": "checkpoint.keep",
    "warmup_steps": "learner.warmup_versions",
    "warmup_ratio": "learner.warmup_versions, in versions",
    "optim": "learner.optimizer, adamw or sgd",
    "adam_beta1": "learner.betas, a list of both",
    "adam_beta2": "learner.betas, a list of both",
    "epsilon": "algorithm.loss.policy.clip_low and algorithm.loss.policy.clip_high",
    "epsilon_high": "algorithm.loss.policy.clip_high",
    "delta": "algorithm.loss.policy.max_ratio",
    "beta": "algorithm.loss.kl.coef, in a table where there is a KL (AdamW's decay rates are learner.betas)",
    "use_bias_correction_kl": "algorithm.loss.kl.weight, ratio",
    "loss_type": "algorithm.loss.aggregation.mode, token-mean (dapo), seq-mean-token-mean (grpo), "
    "seq-mean-token-sum-norm (dr_grpo)",
    "importance_sampling_level": "algorithm.loss.policy, ppo (token) or gspo (sequence)",
    "top_entropy_quantile": "algorithm.loss.top_entropy_share",
    "scale_rewards": "algorithm.advantages.scale, std or none",
    "mask_truncated_completions": "algorithm.shaping.truncated, mask or train",
    "sync_ref_model": "algorithm.reference.refresh_every, above 0",
    "ref_model_sync_steps": "algorithm.reference.refresh_every, in versions",
    "cliprange": "algorithm.loss.policy.clip_low and algorithm.loss.policy.clip_high",
    "cliprange_value": "algorithm.critic.loss.clip",
    "vf_coef": "algorithm.critic.coef, of a shared critic",
    "gradient_checkpointing": "learner.activation_checkpointing",
    "torch_compile": "learner.compile",
    "reward_funcs": "reward",
    "reward_weights": "reward, a weight in each table",
    "eval_steps": "eval.every",
    "num_generations_eval": "eval.num_samples",
    "report_to": "run.trackers",
    "output_dir": "run.dir",
    "vllm_gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "vllm_tensor_parallel_size": "rollout.tensor_parallel_size",
    "vllm_importance_sampling_correction": "algorithm.correction.weight, null for none",
    "vllm_importance_sampling_mode": "algorithm.correction.weight.level and algorithm.correction.weight.outside",
    "vllm_importance_sampling_clip_max": "algorithm.correction.weight.upper",
    "vllm_importance_sampling_cap": "algorithm.correction.weight.upper",
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
    "eps_clip": "algorithm.loss.policy.clip_low and algorithm.loss.policy.clip_high",
    "eps_clip_low_high": "algorithm.loss.policy.clip_low and algorithm.loss.policy.clip_high",
    "dual_clip": "algorithm.loss.policy.dual_clip",
    "policy_loss_type": "algorithm.loss.policy, by name",
    "advantage_estimator": "algorithm, a recipe (ppo for gae), or algorithm.advantages",
    "lambd": "algorithm.advantages.lam",
    "kl_coef": "algorithm.kl_reward.coef",
    "init_kl_coef": "algorithm.kl_reward.coef",
    "kl_target": "algorithm.kl_reward.target",
    "kl_horizon": "algorithm.kl_reward.horizon",
    "kl_estimator": "algorithm.loss.kl.estimator",
    "entropy_loss_coef": "algorithm.loss.entropy.coef",
    "entropy_coef": "algorithm.loss.entropy.coef",
    "dynamic_filtering": "algorithm.filter.keep, spread",
    "dynamic_filtering_reward_range": "algorithm.filter.between, with keep mean_between",
    "enable_vllm_is_correction": "algorithm.correction.weight, null for none",
    "vllm_is_truncated_threshold": "algorithm.correction.weight.upper",
    "critic_pretrain": "algorithm.critic.model",
    "critic_learning_rate": "algorithm.critic.lr",
    "value_clip": "algorithm.critic.loss.clip",
    "freezing_actor_steps": "algorithm.critic.warmup_versions",
    "adam_offload": "learner.offload",
    # AReaL, prime-rl
    "max_head_offpolicyness": "max_staleness",
    "max_off_policy_steps": "max_staleness",
    "use_decoupled_loss": "algorithm.correction.proximal, recompute",
    "behav_imp_weight_cap": "algorithm.correction.rejections",
}
"""Key -> the key here. What stands behind a comma tells how the value differs."""

_GROUPS = {
    # the objective
    "the coefficient of the entropy stays what it is": "use_adaptive_entropy",
    "algorithm.reference.refresh_every copies the policy's weights whole, as with an alpha of 1": (
        "ref_model_mixup_alpha"
    ),
    "a KL term alone decides whether there is a reference model, and algorithm.reference has its options": "ref",
    # the course of a run
    "the data is gone through until learner.max_versions are trained, and asyncrl check says how often that is": (
        "total_epochs num_train_epochs num_episodes"
    ),
    "the learning rate stays what it is after learner.warmup_versions": (
        "lr_scheduler_type lr_scheduler warmup_style min_lr_ratio"
    ),
    "checkpoint.every writes checkpoints, and asyncrl train --resume goes on from the newest in the run directory": (
        "save_strategy resume_mode resume_from_path resume_from_checkpoint ckpt_path load_checkpoint max_ckpt_num"
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
    "FSDP2 shards the learner over learner.num_ranks": "fsdp fsdp_config fsdp_size deepspeed zero_stage",
    "a sequence is whole on one rank": "ulysses_sequence_parallel_size ring_attn_size",
    "sequences are always packed without padding, up to learner.max_tokens_per_microbatch": (
        "use_remove_padding packing_samples use_dynamic_bsz use_dynamic_batch"
    ),
    "adapters have no dropout": "lora_dropout",
    "the engine's longest sequence is data.max_prompt_tokens and the longest completion together": (
        "max_model_len vllm_max_model_length"
    ),
}

ABSENT: dict[str, str] = {key: said for said, keys in _GROUPS.items() for key in keys.split()}
"""Key without a counterpart -> what is done here, or what is not built and what that amounts to. docs/migrating.md has
the same."""
