"""The options of the tests."""


def pytest_addoption(parser):
    parser.addoption(
        "--require-servers",
        action="store_true",
        help="fail a test whose storage server cannot be installed, instead of skipping it",
    )
