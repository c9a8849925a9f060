"""Everything about the task that is trained: prompts in, scored trajectories out.

Read `tasks.py` (the demonstrations) for what rows look like, `dataset.py` (with `rows.py` below it) for
how rows become prompts, `env.py` for one rollout, `rewards.py` and `gsm8k.py` for what a completion is
worth, and `reward_pool.py` with `reward_worker.py` for where rewards run: in subprocesses that can be
killed. `user_code.py` finds functions that a config names as `module:attr`. Nothing here imports torch.
"""
