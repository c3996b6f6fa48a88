"""The verbs as click commands: names, options, help, and the names of their functions in actions/."""
