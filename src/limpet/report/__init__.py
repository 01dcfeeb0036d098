"""Pages that show runs: HTML with inline SVG, without scripts, for the verbs report and ui.

Terms: a *series* is the values of a metric on one line of a plot. The *contents* of a version are
its tree, with statistics of its tensors.
May import: the root modules, ``format``, ``storage``, ``layout``, ``snapshot``, and ``run``.
"""
