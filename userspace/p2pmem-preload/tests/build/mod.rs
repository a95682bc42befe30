// SPDX-License-Identifier: MIT OR Apache-2.0

//! What the tests need to build and run C programs with the shim.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Returns whether the test runs in the project's sandbox. The sandbox has a compiler and headers, so no test is skipped
/// there.
pub(crate) fn in_sandbox() -> bool {
    Path::new("/etc/p2pmem-kernel").exists()
}

pub(crate) fn cc(arguments: &[&str], extra: &[&Path]) -> bool {
    let out = Command::new("cc").args(arguments).args(extra).output();
    if let Ok(out) = &out {
        eprintln!("{}", String::from_utf8_lossy(&out.stderr));
    }
    out.is_ok_and(|out| out.status.success())
}

/// Returns the library, which cargo builds in the folder of this test.
pub(crate) fn shim() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let folder = test.parent().unwrap();
    let places = [folder.to_owned(), folder.parent().unwrap().to_owned()];
    let found = places
        .iter()
        .map(|dir| dir.join("libp2pmem_preload.so"))
        .find(|path| path.exists());
    found.expect("libp2pmem_preload.so beside the test")
}
