"""Other libraries' ways to save and load, over this engine: they translate, they decide nothing."""
