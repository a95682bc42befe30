// SPDX-License-Identifier: MIT OR Apache-2.0

//! Tools of the tests of both C libraries: the generated header, and an installed library that C and C++ programs use. The
//! crate p2pmem-async-capi includes this file, so the folder of the crate is that of the test.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Returns whether the test runs in the project's sandbox, which has all tools, so that no test may be skipped.
pub fn in_sandbox() -> bool {
    Path::new("/etc/p2pmem-kernel").exists()
}

/// Returns the folder of the crate.
pub fn here() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Runs a tool. Returns `None` if the tool is not installed, which fails the test in the sandbox.
pub fn tool(command: &mut Command) -> Option<Output> {
    match command.output() {
        Ok(out) => Some(out),
        Err(error) => {
            assert!(!in_sandbox(), "in the sandbox {command:?} must run, but {error}");
            eprintln!("skipped: {command:?}: {error}");
            None
        }
    }
}

/// Returns the output of a program.
pub fn text(out: &Output) -> String {
    format!(
        "{}{}",
        String::from_utf8_lossy(&out.stdout),
        String::from_utf8_lossy(&out.stderr)
    )
}

/// Fails if cbindgen creates another header than the committed one.
pub fn check_header(name: &str) {
    let Some(version) = tool(Command::new("cbindgen").arg("--version")) else {
        return;
    };
    let out = Command::new(here().join("generate"))
        .arg("--stdout")
        .output()
        .expect("run the script `generate`");
    assert!(out.status.success(), "{}", text(&out));
    let committed = std::fs::read_to_string(here().join("include").join(name)).expect(name);
    let fresh = String::from_utf8(out.stdout).expect("cbindgen writes UTF-8");
    if fresh != committed {
        let first = fresh.lines().zip(committed.lines()).position(|(a, b)| a != b);
        assert!(
            !in_sandbox(),
            "include/{name} is out of date from line {:?} on: run {}/generate",
            first.map(|n| n + 1),
            here().display()
        );
        eprintln!("skipped: another cbindgen: {}", text(&version));
    }
}

/// Returns the directory of the library, which cargo builds beside this test.
fn build_folder(library: &str) -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let folder = test.parent().unwrap();
    let found = [folder, folder.parent().unwrap()]
        .into_iter()
        .find(|dir| dir.join(library).exists());
    found.expect("the library beside the test").to_owned()
}

/// An installed library.
pub struct Installed {
    dir: tempfile::TempDir,
    cflags: Vec<String>,
    libs: Vec<String>,
}

impl Installed {
    /// Installs a library of the build folder with the crate's script. `others` are files that the script installs too, and
    /// that only need to exist. Returns `None` if pkg-config is not installed.
    pub fn new(library: &str, others: &[&str], package: &str) -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let build = dir.path().join("build");
        std::fs::create_dir(&build).unwrap();
        std::fs::copy(build_folder(library).join(library), build.join(library)).unwrap();
        for other in others {
            std::fs::write(build.join(other), "").unwrap();
        }
        let prefix = dir.path().join("usr");
        let out = Command::new(here().join("install"))
            .args([&build, &prefix])
            .env_remove("DESTDIR")
            .output()
            .unwrap();
        assert!(out.status.success(), "{}", text(&out));
        let pkg_config = |what: &str| {
            let mut command = Command::new("pkg-config");
            command
                .args([what, package])
                .env("PKG_CONFIG_PATH", prefix.join("lib/pkgconfig"));
            let out = tool(&mut command)?;
            assert!(out.status.success(), "{}", text(&out));
            let words = String::from_utf8(out.stdout).unwrap();
            Some(words.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
        };
        assert_eq!(pkg_config("--modversion")?, [env!("CARGO_PKG_VERSION")]);
        let (cflags, libs) = (pkg_config("--cflags")?, pkg_config("--libs")?);
        Some(Self { dir, cflags, libs })
    }

    fn compile(&self, compiler: &str, arguments: &[&str], more: &[String]) -> Option<()> {
        let mut compile = Command::new(compiler);
        compile.args(["-Wall", "-Wextra", "-Werror"]).args(arguments);
        let out = tool(compile.args(&self.cflags).args(more))?;
        assert!(out.status.success(), "{compiler}: {}", text(&out));
        Some(())
    }

    /// Compiles a program as C++ and as C99, runs it, and checks that it prints the version of the library. `more` are
    /// arguments of the compilers.
    pub fn check_program(&self, source: &str, more: &[&str]) {
        let file = |name: &str| {
            let file = self.dir.path().join(name);
            std::fs::write(&file, source).unwrap();
            file.display().to_string()
        };
        let (cpp, c) = (file("program.cc"), file("program.c"));
        let with = |standard, file| [&["-Wpedantic", standard, file], more].concat();
        self.compile("c++", &with("-std=c++17", &cpp), &["-fsyntax-only".into()]);
        let binary = self.dir.path().join("program");
        let link = [&["-o".into(), binary.display().to_string()], &self.libs[..]].concat();
        if self.compile("cc", &with("-std=c99", &c), &link).is_some() {
            let out = Command::new(&binary)
                .env("LD_LIBRARY_PATH", self.dir.path().join("usr/lib"))
                .output()
                .unwrap();
            assert!(out.status.success(), "{}", text(&out));
            assert_eq!(
                String::from_utf8_lossy(&out.stdout),
                format!("{}\n", env!("CARGO_PKG_VERSION"))
            );
        }
    }

    /// Compiles examples, whose tests are in VMs, because they need hardware or the module.
    pub fn check_examples(&self, names: &[&str]) {
        if in_sandbox() {
            let files = names.iter().map(|name| here().join("examples").join(name));
            let files: Vec<_> = files.map(|file| file.display().to_string()).collect();
            self.compile("cc", &["-std=gnu11", "-fsyntax-only"], &files);
        }
    }

    /// Checks the soname, and that a program which does not use RDMA runs without libibverbs.
    pub fn check_needed(&self, library: &str) {
        let file = self.dir.path().join("usr/lib").join(library);
        if let Some(needed) = tool(Command::new("readelf").arg("-d").arg(file)) {
            let needed = text(&needed);
            assert!(needed.contains(&format!("soname: [{library}.0]")), "{needed}");
            assert!(
                !needed.contains("libibverbs"),
                "a program that does not use RDMA must run without libibverbs: {needed}"
            );
        }
    }
}
