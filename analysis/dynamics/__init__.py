"""How a run moved: its series by step, when each changed, what moved first, and what a schedule would have done."""
