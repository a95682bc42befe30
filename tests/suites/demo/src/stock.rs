// SPDX-License-Identifier: MIT OR Apache-2.0

//! Checks that the running kernel is the distribution's own, unmodified.
//!
//! The check has four steps. dpkg verifies that the installed packages' files are unmodified. The image in /boot is the
//! packed one. Its decompressed content is equal to the booted image, byte by byte. The running kernel has the build id
//! and version of that image. In addition, only p2pmem's module may have tainted the kernel, as a module that is not
//! signed with a key of the image does.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use serde::Serialize;

/// Out-of-tree module.
const TAINT_OUT_OF_TREE: u64 = 1 << 12;
/// A module without a signature that the kernel knows.
const TAINT_UNSIGNED: u64 = 1 << 13;

/// The installed kernel, inspected before the boot.
#[derive(Debug)]
pub struct Image {
    /// The packages of the image and its modules, with their versions.
    pub packages: Vec<String>,
    /// Modified files of these packages, as `dpkg --verify` lists them.
    pub modified: Vec<String>,
    /// The decompressed image.
    pub bytes: Vec<u8>,
}

/// The properties of the running kernel.
#[derive(Debug, Clone, Default)]
pub struct Running {
    /// `/proc/version`.
    pub version: String,
    /// `/sys/kernel/notes`.
    pub notes: Vec<u8>,
    /// `/proc/sys/kernel/tainted` before the module was loaded.
    pub taint_before: u64,
    /// The same with the module loaded.
    pub taint_after: u64,
    /// `/proc/modules` with the module loaded.
    pub modules: String,
}

/// The verdict with its evidence.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct StockImage {
    /// Packages of the kernel.
    pub packages: Vec<String>,
    /// The running kernel's build id.
    pub build_id: String,
    /// Reasons why it is not stock; empty if it is.
    pub objections: Vec<String>,
}

fn run(program: &str, arguments: &[&str]) -> Result<(bool, String)> {
    let output = Command::new(program)
        .args(arguments)
        .env("LC_ALL", "C")
        .output()
        .with_context(|| program.to_owned())?;
    Ok((
        output.status.success(),
        String::from_utf8_lossy(&output.stdout).into_owned(),
    ))
}

/// Returns the package of a file.
fn owner(path: &Path) -> Option<String> {
    let (known, answer) = run("dpkg-query", &["--search", path.to_str()?]).ok()?;
    known.then(|| first_owner(&answer)).flatten()
}

/// Returns the package in an answer of `dpkg-query --search`: `package: path`, or `package:amd64: path`.
fn first_owner(answer: &str) -> Option<String> {
    let (package, _) = answer.lines().next()?.rsplit_once(": ")?;
    Some(package.split(", ").next()?.to_owned())
}

/// Inspects the installed kernel of a release, and the image that is booted.
///
/// # Errors
///
/// A file cannot be read, or no package owns it.
pub fn inspect(release: &str, booted: &Path) -> Result<Image> {
    let boot = PathBuf::from(format!("/boot/vmlinuz-{release}"));
    let modules = PathBuf::from(format!("/usr/lib/modules/{release}"));
    let image = fs::read(&boot).with_context(|| boot.display().to_string())?;
    // Depending on the packaging, the file in /boot belongs to a package or is a copy of a file beside the modules.
    let packed = [boot.clone(), modules.join("vmlinuz")];
    let (packed, package) = packed
        .iter()
        .find_map(|path| Some((path, owner(path)?)))
        .with_context(|| format!("{} is of no package", boot.display()))?;
    ensure!(
        fs::read(packed).with_context(|| packed.display().to_string())? == image,
        "{} is not what its package has in {}",
        boot.display(),
        packed.display()
    );
    let drivers = owner(&modules.join("kernel")).context("the kernel's modules are of no package")?;
    let mut names = vec![package, drivers];
    names.dedup();
    let mut packages = Vec::new();
    let mut modified = Vec::new();
    for name in names {
        let (_, version) = run(
            "dpkg-query",
            &["--show", "--showformat", "${Package} ${Version}", &name],
        )?;
        packages.push(version.trim().to_owned());
        let (unmodified, list) = run("dpkg", &["--verify", &name])?;
        modified.extend(list.lines().map(str::to_owned));
        if !unmodified && list.is_empty() {
            bail!("dpkg cannot verify {name}");
        }
    }
    let bytes = p2pmem_vm::kernel::extract(&image).with_context(|| boot.display().to_string())?;
    ensure!(
        fs::read(booted).with_context(|| booted.display().to_string())? == bytes,
        "{} is not what {} holds",
        booted.display(),
        boot.display()
    );
    Ok(Image {
        packages,
        modified,
        bytes,
    })
}

/// Returns the GNU build id in a section of ELF notes.
pub fn build_id(notes: &[u8]) -> Option<&[u8]> {
    const GNU_BUILD_ID: u32 = 3;
    let mut rest = notes;
    loop {
        let word = |at: usize| Some(u32::from_le_bytes(rest.get(at..at + 4)?.try_into().ok()?));
        let (name, description, kind) = (word(0)? as usize, word(4)? as usize, word(8)?);
        let start = 12usize.checked_add(name.checked_next_multiple_of(4)?)?;
        let end = start.checked_add(description)?;
        if kind == GNU_BUILD_ID && rest.get(12..12 + name)? == b"GNU\0" {
            return rest.get(start..end).filter(|id| !id.is_empty());
        }
        rest = rest.get(start.checked_add(description.checked_next_multiple_of(4)?)?..)?;
    }
}

/// Returns whether the bytes contain the part, which is not empty.
fn contains(bytes: &[u8], part: &[u8]) -> bool {
    bytes
        .windows(part.len())
        .any(|window| window[0] == part[0] && window == part)
}

/// Compares the running kernel with the installed one. `ours` is the name of p2pmem's module.
pub fn check(image: &Image, running: &Running, ours: &str) -> StockImage {
    let mut objections: Vec<String> = image
        .modified
        .iter()
        .map(|line| format!("not as packed: {line}"))
        .collect();
    let mut object = |holds: bool, why: String| {
        if !holds {
            objections.push(why);
        }
    };
    let version = running.version.trim();
    object(
        !version.is_empty() && contains(&image.bytes, version.as_bytes()),
        format!("the installed image has no kernel that calls itself {version:?}"),
    );
    let id = build_id(&running.notes).unwrap_or_default();
    let hex = id.iter().fold(String::new(), |hex, byte| hex + &format!("{byte:02x}"));
    object(
        !id.is_empty() && contains(&image.bytes, id),
        format!("the running kernel's build id {hex:?} is not that of the installed image"),
    );
    object(
        running.taint_before == 0,
        format!("tainted ({}) before our module was loaded", running.taint_before),
    );
    object(
        running.taint_after & !(TAINT_OUT_OF_TREE | TAINT_UNSIGNED) == 0,
        format!("tainted ({}) by more than a module from elsewhere", running.taint_after),
    );
    let tainting = tainting(&running.modules);
    object(
        tainting == [ours],
        format!("the modules from elsewhere are {tainting:?}, not {ours} alone"),
    );
    StockImage {
        packages: image.packages.clone(),
        build_id: hex,
        objections,
    }
}

/// Returns the modules in `/proc/modules` that taint the kernel: those with letters in parentheses at the end of the
/// line.
fn tainting(modules: &str) -> Vec<&str> {
    modules
        .lines()
        .filter(|line| line.trim_end().ends_with(')'))
        .filter_map(|line| line.split(' ').next())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn note(name: &[u8], kind: u32, description: &[u8]) -> Vec<u8> {
        let mut note = Vec::new();
        note.extend((name.len() as u32).to_le_bytes());
        note.extend((description.len() as u32).to_le_bytes());
        note.extend(kind.to_le_bytes());
        for part in [name, description] {
            note.extend(part);
            note.resize(note.len().next_multiple_of(4), 0);
        }
        note
    }

    fn image() -> Image {
        Image {
            packages: vec!["linux-image 1".into()],
            modified: vec![],
            bytes: b"..Linux version 7.2 (Debian)\n..\x01\x02\x03\x04\x05..".to_vec(),
        }
    }

    fn running() -> Running {
        Running {
            version: "Linux version 7.2 (Debian)\n".into(),
            notes: note(b"GNU\0", 3, &[1, 2, 3, 4, 5]),
            taint_before: 0,
            taint_after: 12288,
            modules: "p2pmem 100 0 - Live 0x0 (OE)\nnvme 1 0 - Live 0x0\n".into(),
        }
    }

    #[test]
    fn stock_kernel_has_no_objections() {
        let stock = check(&image(), &running(), "p2pmem");
        assert_eq!(stock.objections, Vec::<String>::new());
        assert_eq!(stock.build_id, "0102030405");
    }

    #[test]
    fn each_mismatch_is_an_objection() {
        let broken: [(&str, Running); 6] = [
            (
                "calls itself",
                Running {
                    version: "Linux version 7.3\n".into(),
                    ..running()
                },
            ),
            (
                "calls itself",
                Running {
                    version: "\n".into(),
                    ..running()
                },
            ),
            (
                "build id",
                Running {
                    notes: note(b"GNU\0", 3, &[9; 20]),
                    ..running()
                },
            ),
            (
                "before our module",
                Running {
                    taint_before: 1,
                    ..running()
                },
            ),
            (
                "by more than",
                Running {
                    taint_after: 12288 | 512,
                    ..running()
                },
            ),
            (
                "from elsewhere are",
                Running {
                    modules: "p2pmem 1 0 - Live 0x0 (OE)\nother 1 0 - Live 0x0 (O)\n".into(),
                    ..running()
                },
            ),
        ];
        for (why, running) in broken {
            let stock = check(&image(), &running, "p2pmem");
            assert_eq!(stock.objections.len(), 1, "{stock:?}");
            assert!(stock.objections[0].contains(why), "{stock:?}");
        }
        let modified = Image {
            modified: vec!["??5?????? /usr/lib/modules/x".into()],
            ..image()
        };
        assert_eq!(check(&modified, &running(), "p2pmem").objections.len(), 1);
        let nothing = check(&image(), &Running::default(), "p2pmem");
        assert_eq!(nothing.objections.len(), 3);
    }

    #[test]
    fn build_id_is_found_in_notes() {
        let id = [7; 20];
        let all = [
            note(b"Xen\0", 18, b"PVH!"),
            note(b"Linux\0", 0x101, &[1, 0, 0]),
            note(b"GNU\0", 3, &id),
        ]
        .concat();
        assert_eq!(build_id(&all), Some(&id[..]));
        assert_eq!(build_id(&all[..all.len() - 1]), None);
        assert_eq!(build_id(b""), None);
        assert_eq!(build_id(&[0xff; 64]), None);
    }

    #[test]
    fn first_owner_of_file_is_parsed() {
        assert_eq!(
            first_owner("linux-binary-7: /usr/x\n").as_deref(),
            Some("linux-binary-7")
        );
        assert_eq!(first_owner("libc6:amd64, x: /usr/x\n").as_deref(), Some("libc6:amd64"));
        assert_eq!(first_owner(""), None);
    }
}
