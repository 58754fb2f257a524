"""fx graphs and instruction lists -> Python source; the plan folder."""
