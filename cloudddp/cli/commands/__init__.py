"""The verbs as click commands: names, options and help. They import click and name their functions in
actions/."""
