"""Everything about the task that is trained: prompts in, scored trajectories out.

tasks.py      the demonstrations: what rows look like
dataset.py    how rows become prompts               (rows.py, sources.py, prompts.py, mixture.py below it)
supervised.py how rows become supervised tokens      (supervised_rows.py below it)
order.py      which prompt comes next, with which seeds
env.py        one rollout, and the seams of this folder
group_scoring.py     when a group's answers are scored      -> weighted_rewards.py   all rewards, added up
rewards.py           what a reward is, by name      (reward_styles.py, gsm8k.py, math_answer.py, reward_model.py)
reward_pool.py       where rewards run: subprocesses that can be killed   (reward_process.py, reward_worker.py)
reward_checks.py     rewards against rows, before anything starts   (reward_import.py: the user's code, elsewhere)
eval_metrics.py, eval_report.py     the numbers of an evaluation
inspect_data.py      what `asyncrl data` shows

Nothing here imports torch, but a reward model in its own worker.
"""
