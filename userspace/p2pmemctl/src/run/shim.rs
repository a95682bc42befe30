// SPDX-License-Identifier: MIT OR Apache-2.0

//! The preload shim: where it is, and how a command loads it.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use anyhow::{bail, Context as _};

use super::elf::{Elf, Target};

/// File name of the shim.
const NAME: &str = "libp2pmem_preload.so";
/// Name of the environment variable with the path of the shim.
const VARIABLE: &str = "P2PMEM_PRELOAD";

/// The shim.
#[derive(Debug)]
pub(super) struct Shim {
    path: PathBuf,
    target: Target,
}

impl Shim {
    /// Finds the shim: at the path in the argument or the environment, otherwise beside this program or where `make
    /// install` puts it.
    pub(super) fn find(path: Option<&Path>) -> anyhow::Result<Self> {
        let variable = std::env::var_os(VARIABLE).filter(|value| !value.is_empty());
        if let Some(path) = path.or(variable.as_ref().map(Path::new)) {
            return Self::at(path);
        }
        let program = std::env::current_exe().context("cannot find this program's file")?;
        let folder = program.parent().unwrap_or(Path::new("/"));
        let places = places(folder);
        match places.iter().find(|place| place.exists()) {
            Some(place) => Self::at(place),
            None => bail!(
                "{NAME} is neither beside {} nor in {}: install it (make install), or set {VARIABLE} to its path",
                program.display(),
                folder.join("../lib").display()
            ),
        }
    }

    fn at(path: &Path) -> anyhow::Result<Self> {
        let shown = path.display();
        let absolute = path
            .canonicalize()
            .with_context(|| format!("cannot find the preload shim {shown}"))?;
        // The separators of LD_PRELOAD cannot be escaped.
        if absolute.as_os_str().as_bytes().iter().any(|byte| b" :".contains(byte)) {
            bail!("the path of the preload shim {shown} has a space or a colon: move the file, and set {VARIABLE}");
        }
        let file = File::open(&absolute).with_context(|| format!("cannot open the preload shim {shown}"))?;
        match Elf::read(&file).with_context(|| format!("cannot read the preload shim {shown}"))? {
            Some(elf) => Ok(Self {
                path: absolute,
                target: elf.target,
            }),
            None => bail!("{shown} is not a shared library: set {VARIABLE} to the path of {NAME}"),
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn target(&self) -> Target {
        self.target
    }

    /// Returns the value of `LD_PRELOAD` with the shim after all other libraries. Some of them, such as the address
    /// sanitizer, must be first.
    pub(super) fn preload(&self, before: Option<&OsStr>) -> OsString {
        let before = before.unwrap_or_default();
        let present = before
            .as_bytes()
            .split(|byte| b" :".contains(byte))
            .any(|library| library == self.path.as_os_str().as_bytes());
        if present {
            return before.to_owned();
        }
        let mut all = before.to_owned();
        if !all.is_empty() {
            all.push(":");
        }
        all.push(&self.path);
        all
    }
}

/// Returns the places of the shim for a program in `folder`, in the order in which they are tried.
fn places(folder: &Path) -> Vec<PathBuf> {
    let multiarch = format!("../lib/{}-linux-gnu", std::env::consts::ARCH);
    let folders = ["", "../lib", &multiarch, "../lib64"];
    folders.map(|place| folder.join(place).join(NAME)).to_vec()
}

#[cfg(test)]
mod tests {
    use super::super::elf::tests::file;
    use super::*;
    use std::fs;

    #[test]
    fn the_shim_is_found_beside_the_program_or_installed() {
        let dir = tempfile::tempdir().unwrap();
        let bin = dir.path().join("bin");
        let expected = ["bin", "lib", "lib/x86_64-linux-gnu", "lib64"];
        for (place, folder) in places(&bin).iter().zip(expected) {
            let folder = dir.path().join(folder);
            fs::create_dir_all(&bin).unwrap();
            fs::create_dir_all(&folder).unwrap();
            assert!(!place.exists() || !cfg!(target_arch = "x86_64"));
            fs::write(folder.join(NAME), file(&[])).unwrap();
            if cfg!(target_arch = "x86_64") {
                assert_eq!(
                    Shim::at(place).unwrap().path(),
                    folder.join(NAME).canonicalize().unwrap()
                );
            }
        }
    }

    #[test]
    fn other_files_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let refused = |path: &Path| format!("{:#}", Shim::find(Some(path)).unwrap_err());
        assert!(refused(Path::new("/nonexistent/shim.so")).contains("No such file"));
        let text = dir.path().join("text");
        fs::write(&text, "text").unwrap();
        assert!(refused(&text).contains("is not a shared library"));
        let spaced = dir.path().join("a space.so");
        fs::write(&spaced, file(&[])).unwrap();
        assert!(refused(&spaced).contains("has a space or a colon"));
    }

    #[test]
    fn other_preloaded_libraries_stay() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().canonicalize().unwrap().join("shim.so");
        fs::write(&path, file(&[])).unwrap();
        let shim = Shim::find(Some(&path)).unwrap();
        let path = path.to_str().unwrap();
        let preload = |before: Option<&str>| shim.preload(before.map(OsStr::new)).into_string().unwrap();
        assert_eq!(preload(None), path);
        assert_eq!(preload(Some("")), path);
        assert_eq!(preload(Some("libasan.so.8")), format!("libasan.so.8:{path}"));
        let present = format!("{path} libasan.so.8");
        assert_eq!(preload(Some(&present)), present);
    }
}
