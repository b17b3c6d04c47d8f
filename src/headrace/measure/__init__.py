"""What a training step is made of: one definition of each metric, used live, offline, in the demo and in the benches.

Clock, device events, memory and gather are arguments; `headrace.torch.measure` supplies them and is what users import.
"""
