# SPDX-License-Identifier: MIT OR Apache-2.0
# Targets of p2pmem. `make help` lists the targets and the variables.
#
# Without KDIR and KREL, targets build and run in the sandbox: a Debian root folder in the cache, which they create if
# it is missing. With KDIR or KREL, the module is built on this machine. Kbuild has the module's build rules.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-print-directory

# The version stands in userspace/Cargo.toml.
VERSION = $(shell sed -n '/^version = "/ { s///; s/".*//p; q }' userspace/Cargo.toml)
sandbox := tools/sandbox/sandbox
in := $(sandbox) run
# The first group of the sandbox's packages compiles the module and the programs of the demo.
in-build := $(sandbox) run --group build
reports := build/reports

# The name of cargo's target folder in the cache. Checkouts with different names build at the same time.
target := $(or $(P2PMEM_TARGET),main)
# The module and the user-space programs for the test bed. Both paths are valid in the sandbox.
export P2PMEM_MODULE := /src/build/p2pmem.ko
export P2PMEM_BIN := /build/target/$(target)/debug
# The path of the checkout. tools/check-tree reports files that contain this path.
export P2PMEM_CHECKOUT := $(CURDIR)
export JOBS V KEEP_WORK

# Cargo in the sandbox, with the crate versions of the lock files. Every command builds a whole workspace with all features, and
# with the examples and their dependencies, so that all targets share one build of each crate.
cargo-build := $(in) cargo --locked build --workspace --all-features --lib --bins --examples

ifneq ($(origin KDIR),undefined)
module-for := kdir $(KDIR)
else ifneq ($(origin KREL),undefined)
module-for := krel $(KREL)
endif

help: ## print this list
	@awk -F ':.*## ' '/^[a-z][a-z_-]*:.*## / { \
		kind = substr($$2, 1, 2); text = $$2; sub(/^[+-] /, "", text); \
		line = sprintf("  %-16s %s\n", $$1, text); \
		if (kind == "+ ") main = main line; else if (kind == "- ") use = use line; else part = part line } \
		END { printf "Main targets:\n%sParts:\n%sInstallation on this machine:\n%s", main, part, use }' \
		$(firstword $(MAKEFILE_LIST))
	@echo 'Variables:'
	@echo '  KDIR=<folder>         build the module on this machine, against a kernel build folder with Rust metadata'
	@echo '  KREL=<release>        build the module on this machine, for an installed kernel; creates missing metadata'
	@echo '  PEER_SYMVERS=<file>   Module.symvers of an RDMA core with the peer-memory interface, or none'
	@echo '  P2PMEM_PEER=n         build the module without the peer-memory client'
	@echo '  P2PMEM_ATTACH=n       build the module without attachments of functions to dma-bufs'
	@echo '  OUT=<folder>          output folder of rust-metadata for KREL'
	@echo '  JOBS=<n> V=1          number of jobs; print whole commands of the module build'
	@echo '  P2PMEM_CACHE=<folder> folder of the caches       (default: $${XDG_CACHE_HOME:-~/.cache}/p2pmem)'
	@echo '  P2PMEM_MIRROR=<url>   Debian mirror              (default: the mirror of apt)'
	@echo '  TESTS=<part of a name> tests in guests to run    (default: all)'
	@echo '  P2PMEM_KERNEL=<7.x>   stock kernel version       (default: see tools/sandbox/make-root)'

# --- main targets -----------------------------------------------------------------------------------------------------

demo: ## + run the demo on the stock kernel: transfers between drives, accelerators, and NICs, verified and measured
	@tools/demo

demo-built: modules user testbed ## run the demo with the programs of `make user` and `make testbed`, which it builds if they are missing
	@mkdir -p $(reports)
	@$(in) $(P2PMEM_BIN)/p2pmem-demo --module $(P2PMEM_MODULE) --report $(reports)/demo.json --page $(reports)/demo.html

demo-async: modules user testbed ## + run the demo of accelerators that drive NICs, beside processors that do: instructions, register accesses, host bytes
	@mkdir -p $(reports)
	@$(in) $(P2PMEM_BIN)/p2pmem-demo-async --module $(P2PMEM_MODULE) --report $(reports)/async.json --page $(reports)/async.html

demo-async-short: modules user testbed ## run demo-async with a quarter of its iterations
	@mkdir -p $(reports)
	@$(in) $(P2PMEM_BIN)/p2pmem-demo-async --module $(P2PMEM_MODULE) --report $(reports)/async-short.json --page $(reports)/async-short.html --shorter 4

demo-recorder: modules user testbed ## + run the demo of the recorder: accelerator to drives and back by one and two ports, beside the links' rates
	@mkdir -p $(reports)
	@$(in) $(P2PMEM_BIN)/p2pmem-demo-recorder --module $(P2PMEM_MODULE) --report $(reports)/recorder.json

demo-transfer: modules user testbed ## + run the demo of the transfer suite: every pair of memories by every mode, calls, the parts of a WRITE
	@mkdir -p $(reports)
	@$(in) $(P2PMEM_BIN)/p2pmem-demo-transfer --module $(P2PMEM_MODULE) --report $(reports)/transfer.json

demo-collectives: modules user testbed ## + run the demo of collective operations: cost of each algorithm beside its formula, training, inference
	@mkdir -p $(reports)
	@$(in) $(P2PMEM_BIN)/p2pmem-demo-collectives --module $(P2PMEM_MODULE) --clients tests/suites/clients \
		--report $(reports)/collectives.json --page $(reports)/collectives.html

test: ## + run the checks and tests that the changes since the last full run can affect; the last line is "N passed, N failed"
	@tools/run-tests

test-all: ## + run all checks, tests, benchmarks, and demos, with more rounds; what passed on this tree is not repeated (AGAIN=1: it is)
	@tools/run-tests $(if $(AGAIN),--again,--all)

# --- parts ------------------------------------------------------------------------------------------------------------

sandbox: ## create the sandbox if it is missing
	@tools/probe sandbox tests
	@$(sandbox) make

sandbox-build:
	@tools/probe sandbox build
	@$(sandbox) make build

ifdef module-for
modules: ## build build/p2pmem.ko for the sandbox's stock kernel, or for KDIR or KREL
	@tools/make-modules $(module-for)
else
modules: sandbox-build
	@$(in-build) tools/make-modules sandbox
endif

# The demo needs no test modules.
demo-module: sandbox-build
	@$(in-build) tools/make-modules stock

modules-next: sandbox ## build p2pmem.ko and the test modules for the next kernel series, with clippy, into build/next/
	@$(in) tools/make-modules next

debug-kernel: sandbox ## build the debug kernel: KASAN, lockdep, kmemleak, KUnit, and the peer-memory interface
	@$(in) tools/debug-kernel make >/dev/null

debug-modules: debug-kernel ## build p2pmem.ko and the test modules for the debug kernel, into build/debug/
	@$(in) tools/make-modules debug

# Builds only the programs that the demo runs, so that a first `make demo` is short.
demo-programs: sandbox-build
	@$(in-build) cargo --locked build --manifest-path tests/Cargo.toml -p p2pmem-demo -p p2pmem-fabric -p p2pmem-guest \
		--bin p2pmem-demo --bin p2pmem-demo-guest --bin p2pmem-fabric --bin p2pmem-accel --bin p2pmem-guest-init
	@$(in-build) cargo --locked build --manifest-path userspace/Cargo.toml --no-default-features \
		-p p2pmemctl -p p2pmem-perf -p p2pmem-preload

user: sandbox ## build user space: library, C library, Python package, preload shim, p2pmemctl, exporter, examples
	@$(cargo-build) --manifest-path userspace/Cargo.toml
	@$(in) userspace/p2pmem-python/wheel

wheel: sandbox ## build the optimized wheel of the Python package into build/python-release/
	@$(in) userspace/p2pmem-python/wheel --release

testbed: sandbox ## build the test bed: device models, VM runner, guest programs
	@$(cargo-build) --manifest-path tests/Cargo.toml

lint: sandbox ## check formats, clippy, shell, prose, layers, unsafe, the tree, alerts, dependencies (CHECKS="unsafe tree ..." for some)
	@$(in) tools/lint $(CHECKS)

format: sandbox ## format all Rust sources
	@$(in) bash -c "git ls-files -co --exclude-standard -z 'rust/*.rs' | xargs -0 rustfmt --edition 2021"
	@$(in) cargo fmt --manifest-path userspace/Cargo.toml --all
	@$(in) cargo fmt --manifest-path tests/Cargo.toml --all

ifdef module-for
rust-analyzer: modules ## set up rust-analyzer for module, user space, and tests, and test the setup
	@tools/rust-analyzer host
else
rust-analyzer: sandbox modules
	@tools/rust-analyzer sandbox
endif

# The folder /mnt of the sandbox has the drives of the simulation, so that the pictures show the paths of the guide.
recorder-pictures: sandbox ## make the pictures of the recorder's pages in Documentation/images with a simulated node (three minutes)
	@$(in) bash -c 'mount -t tmpfs none /mnt && P2PMEM_PICTURE_FOLDER=/mnt P2PMEM_PICTURE_RATES=118 exec "$$@"' - \
		cargo --locked test --manifest-path userspace/Cargo.toml -p p2pmem-recorder --all-features --test browser pictures_show
	@mkdir -p Documentation/images
	@for name in light dark phone topology-light topology-dark topology-phone luns-light; do \
		tools/reduce-png $(reports)/recorder-$$name.png Documentation/images/recorder-$$name.png; done

gauge-pictures: sandbox ## make the pictures of the gauge in Documentation/images with simulated measurements (three minutes)
	@P2PMEM_PICTURE_SECONDS=110 $(in) cargo --locked test --manifest-path userspace/Cargo.toml -p p2pmem-perf --all-features --test gauge pictures_show
	@mkdir -p Documentation/images
	@for name in light dark phone; do \
		tools/reduce-png $(reports)/gauge-$$name.png Documentation/images/gauge-$$name.png; done

# STRESS=1 repeats each test and keeps the processors busy, to find tests that fail by luck.
busy := $(if $(STRESS),tools/busy)
test-user: sandbox ## run the tests that need no guest: user space, device models, pure parts of the module (STRESS=1: 50 times, busy)
	@$(in) $(busy) tools/host-tests $(if $(STRESS),--repeat 50)

guest-repeat := $(if $(STRESS),--repeat 10)

test-vm: test-vm-stock test-vm-debug ## run the tests in guests on the stock kernel and on the debug kernel

test-vm-stock: modules user testbed ## run the tests in guests on the stock kernel (STRESS=1: 10 times, busy)
	@$(in) $(busy) tools/vm-tests $(guest-repeat) stock $(TESTS)

test-vm-debug: modules debug-modules user testbed ## run the tests in guests on the debug kernel (STRESS=1: 10 times, busy)
	@$(in) $(busy) tools/vm-tests $(guest-repeat) debug $(TESTS)

kunit: debug-modules testbed ## run the module's KUnit cases in a guest with the debug kernel
	@$(in) tools/kunit

bench: modules user testbed ## count instructions of buffers, decisions, and registrations; fails if a ratio misses its target
	@$(in) tools/make-modules peer
	@$(in) tools/bench

bench-short: modules testbed ## run the benchmark without registrations and live buffers
	@$(in) tools/bench --short

# --- installation on this machine -------------------------------------------------------------------------------------

ifdef KREL
rust-metadata: ## - create the Rust metadata that Debian's headers do not have: for KREL=<release> in OUT=<folder>
	@tools/rust-metadata $(if $(OUT),$(KREL) $(OUT),cached $(KREL) $${P2PMEM_CACHE:-$${XDG_CACHE_HOME:-$$HOME/.cache}/p2pmem}/build)
else
rust-metadata: sandbox-build
	@$(in-build) bash -c 'tools/rust-metadata cached "$$(cat /etc/p2pmem-kernel)" /build'
endif

modules_install: ## - install the module of `make modules KDIR=...` or KREL=... below INSTALL_MOD_PATH or DESTDIR
	@[ -e build/kmod/p2pmem.ko ] || { echo 'modules_install: no module: run make modules KREL=$$(uname -r) first' >&2; exit 1; }
	@env -u MAKEFLAGS -u MFLAGS $(MAKE) -C "$$(cat build/kdir)" M=$(CURDIR) MO=$(CURDIR)/build/kmod \
		INSTALL_MOD_PATH="$(or $(INSTALL_MOD_PATH),$(destdir))" modules_install

programs: ## - build the programs, libraries, man pages, and completions that `make install` installs
	@command -v cargo >/dev/null || { echo 'programs: cargo is missing (Debian: apt-get install cargo)' >&2; exit 1; }
	@command -v cmake >/dev/null || { echo 'programs: cmake is missing (Debian: apt-get install cmake libclang-dev)' >&2; exit 1; }
	@command -v npm >/dev/null || echo 'programs: npm is missing (Debian: apt-get install npm): p2pmem-recorder and p2pmem-perf get no pages in the browser'
	@cargo build --locked --release --manifest-path userspace/Cargo.toml --target-dir $(release-target) \
		-p p2pmemctl -p p2pmem-perf -p p2pmem-collectives -p p2pmem-exporter -p p2pmem-recorder -p p2pmem-capi \
		-p p2pmem-async-capi -p p2pmem-preload -p p2pmem-man $(if $(shell command -v npm),,--no-default-features --features p2pmemctl/top)
	@rm -rf build/man && $(release-target)/release/p2pmem-man build/man

install: programs ## - install user space, headers, and the module if it was built with KDIR or KREL, below DESTDIR and PREFIX
	@DESTDIR="$(destdir)" tools/install "$(release-target)/release" "$(PREFIX)" "$(LIBDIR)" "$(VERSION)"
	@if [ -e build/kmod/p2pmem.ko ]; then \
		$(MAKE) modules_install && DESTDIR="$(destdir)" tools/systemd/install "$(PREFIX)" module; \
	else echo 'install: without the module, which was not built: make modules KREL=$$(uname -r)'; fi

deb: sandbox ## - build the Debian packages into build/deb/, checked by lintian
	@$(in) tools/make-deb

dkms: ## - copy the module's sources to /usr/src, and build and install the module with DKMS
	@tools/dkms $(VERSION) "$(destdir)"

# --- cleaning ---------------------------------------------------------------------------------------------------------

clean: ## remove build/: the module and the reports
	@rm -rf build

distclean: clean ## remove build/ and the whole cache: sandboxes, metadata, targets
	@$(sandbox) distclean

PREFIX ?= /usr/local
LIBDIR ?= $(PREFIX)/lib
# Scripts change folders.
destdir = $(abspath $(DESTDIR))
release-target = $(or $(CARGO_TARGET_DIR),$(CURDIR)/build/target)

.PHONY: help demo demo-built demo-async demo-async-short demo-recorder recorder-pictures gauge-pictures demo-module demo-programs test sandbox sandbox-build modules modules-next debug-kernel debug-modules user wheel testbed lint format rust-analyzer kunit bench bench-short test-user \
	test-all test-vm test-vm-stock test-vm-debug rust-metadata modules_install programs install deb dkms clean distclean
