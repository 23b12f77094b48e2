"""The one exception that a wrong setting raises, before any work starts."""


class SettingError(ValueError):
    """A setting, an input file or a machine cannot do what was asked.

    The message is one sentence: what is wrong, what was found, what to do.
    """
