#!/bin/sh
# Installs Chromium and its driver, which the tests in tests/browser open pages with. Debian and Ubuntu only.
#   tools/browser.sh                 fails where that cannot be done
#   tools/browser.sh --if-possible   says so instead; pytest then skips these tests
set -eu

if command -v chromium > /dev/null && command -v chromedriver > /dev/null; then
    exit 0
fi
if ! command -v apt-get > /dev/null || [ "$(id -u)" != 0 ]; then
    echo "chromium and chromedriver are not installed, and only root can do that, with apt-get: tests/browser is skipped"
    [ "${1:-}" = --if-possible ]
    exit
fi
echo "Installing chromium and chromium-driver for the tests in tests/browser (a minute or two) ..."
export DEBIAN_FRONTEND=noninteractive
if ! { apt-get update --quiet=2 && apt-get install --yes --quiet=2 --no-install-recommends chromium chromium-driver; }; then
    echo "chromium could not be installed: tests/browser is skipped"
    [ "${1:-}" = --if-possible ]
fi
