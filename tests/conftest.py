"""The options of the tests, and the signals that they expect."""

import signal

# A job that a shell starts in the background, or by nohup, ignores these signals, and so would the
# commands that the tests start.
for number, handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
    (signal.SIGQUIT, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)


def pytest_addoption(parser):
    parser.addoption(
        "--require-servers",
        action="store_true",
        help="fail a test whose storage server cannot be installed, instead of skipping it",
    )
