// SPDX-License-Identifier: MIT OR Apache-2.0

//! The program of the command: its path, and whether it loads the preload shim.

use std::ffi::OsStr;
use std::fmt;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::bail;
use nix::unistd::{getgid, getuid};
use rustix::fs::{access, getxattr, Access};

use super::elf::Elf;
use super::shim::Shim;

/// Search path without PATH in the environment.
const DEFAULT_PATH: &str = "/usr/local/bin:/usr/bin:/bin";
/// The most interpreters of a script, as in the kernel.
const MAX_INTERPRETERS: usize = 5;

/// The command cannot be executed.
#[derive(Debug)]
pub(super) enum CannotExecute {
    /// There is no such program.
    NotFound(String),
    /// The file cannot be executed.
    NotExecutable(String),
    /// Another error.
    Other(String),
}

impl CannotExecute {
    /// Returns the exit code that a shell has for this error.
    pub(super) fn exit_code(&self) -> u8 {
        match self {
            Self::NotFound(_) => 127,
            Self::NotExecutable(_) => 126,
            Self::Other(_) => super::FAILED,
        }
    }

    pub(super) fn from_io(program: &Path, error: io::Error) -> Self {
        let text = format!("cannot run {}: {error}", program.display());
        match error.kind() {
            io::ErrorKind::NotFound => Self::NotFound(text),
            io::ErrorKind::PermissionDenied | io::ErrorKind::ExecutableFileBusy => Self::NotExecutable(text),
            // ENOEXEC has no kind.
            _ if error.raw_os_error() == Some(nix::errno::Errno::ENOEXEC as i32) => Self::NotExecutable(text),
            _ => Self::Other(text),
        }
    }
}

impl fmt::Display for CannotExecute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::NotFound(text) | Self::NotExecutable(text) | Self::Other(text)) = self;
        f.write_str(text)
    }
}

impl std::error::Error for CannotExecute {}

/// Finds a program like a shell: a name with a slash is a path, other names are looked up in PATH.
pub(super) fn find(name: &OsStr) -> Result<PathBuf, CannotExecute> {
    let path = std::env::var_os("PATH").unwrap_or_else(|| DEFAULT_PATH.into());
    find_in(name, &path)
}

fn find_in(name: &OsStr, path: &OsStr) -> Result<PathBuf, CannotExecute> {
    let shown = super::text(name);
    let candidates: Vec<PathBuf> = if name.as_bytes().contains(&b'/') {
        vec![name.into()]
    } else {
        // An empty entry is the current folder. The result must have a slash, so that it is not looked up again.
        let folder = |folder: PathBuf| {
            if folder.as_os_str().is_empty() {
                ".".into()
            } else {
                folder
            }
        };
        std::env::split_paths(path)
            .map(|entry| folder(entry).join(name))
            .collect()
    };
    let mut error = CannotExecute::NotFound(format!("{shown} was not found"));
    for candidate in candidates.iter().filter(|_| !name.is_empty()) {
        let Ok(known) = candidate.metadata() else {
            continue;
        };
        let file = candidate.display();
        if known.is_dir() {
            error = CannotExecute::NotExecutable(format!("{file} is a folder"));
        } else if access(candidate, Access::EXEC_OK).is_err() {
            error = CannotExecute::NotExecutable(format!("{file} is not executable"));
        } else {
            return Ok(candidate.clone());
        }
    }
    Err(error)
}

/// Fails if a program does not load the shim. For a script, checks its interpreter. A file that cannot be read passes: the
/// summary shows whether the program has loaded the shim. `notes` receives what the user should know about other programs.
pub(super) fn check(program: &Path, shim: &Shim, notes: &mut dyn Write) -> anyhow::Result<()> {
    let mut program = program.to_owned();
    for _ in 0..MAX_INTERPRETERS {
        let Ok(mut file) = File::open(&program) else {
            return Ok(());
        };
        if let Some(interpreter) = interpreter(&mut file)? {
            program = interpreter;
            continue;
        }
        let Some(elf) = Elf::read(&file)? else {
            return Ok(());
        };
        return check_elf(&program, &file, &elf, shim, notes);
    }
    // The kernel rejects the script with ELOOP.
    Ok(())
}

/// Returns the interpreter of a script.
fn interpreter(file: &mut File) -> io::Result<Option<PathBuf>> {
    let mut line = Vec::new();
    // The kernel reads 256 bytes at most.
    BufReader::new(Read::by_ref(file).take(256)).read_until(b'\n', &mut line)?;
    let Some(rest) = line.strip_prefix(b"#!") else {
        return Ok(None);
    };
    let words = rest.split(|byte| byte.is_ascii_whitespace());
    let path = words.into_iter().find(|word| !word.is_empty());
    Ok(path.map(|path| PathBuf::from(OsStr::from_bytes(path))))
}

fn check_elf(program: &Path, file: &File, elf: &Elf, shim: &Shim, notes: &mut dyn Write) -> anyhow::Result<()> {
    let name = program.display();
    let ignored = "so it ignores the preload shim, and its memory cannot be placed";
    if elf.target != shim.target() {
        bail!(
            "{name} is for another processor or word size than {}, {ignored}: use a build for this machine",
            shim.path().display()
        );
    }
    if let Some(why) = gains_privileges(program, file)? {
        bail!("{name} {why}, {ignored}: run p2pmemctl as the user for which the program runs");
    }
    let Some(segments) = &elf.segments else {
        return Ok(());
    };
    let Some(linker) = &segments.interpreter else {
        bail!("{name} is statically linked, {ignored}: use a dynamically linked build");
    };
    if Path::new(linker)
        .file_name()
        .is_some_and(|name| name.as_bytes().starts_with(b"ld-musl"))
    {
        bail!("{name} uses the C library musl, {ignored}: use a build for the GNU C library");
    }
    if segments.is_go {
        // If standard error is not writable, the note has no reader.
        let _ = writeln!(
            notes,
            "p2pmemctl: {name} is a Go program: mappings by Go's own packages do not go through the C library and are \
             not placed"
        );
    }
    Ok(())
}

/// Returns why the kernel gives a program more privileges than its caller has. The dynamic linker then does not load the
/// shim.
fn gains_privileges(program: &Path, file: &File) -> io::Result<Option<&'static str>> {
    const SET_UID: u32 = 0o4000;
    /// Without the execute bit of the group, the set-group-id bit has another meaning.
    const SET_GID: u32 = 0o2010;
    let known = file.metadata()?;
    if known.mode() & SET_UID != 0 && known.uid() != getuid().as_raw() {
        return Ok(Some("has the set-user-id bit"));
    }
    if known.mode() & SET_GID == SET_GID && known.gid() != getgid().as_raw() {
        return Ok(Some("has the set-group-id bit"));
    }
    let mut capabilities = [0u8; 64];
    if !getuid().is_root() && getxattr(program, "security.capability", &mut capabilities).is_ok() {
        return Ok(Some("has file capabilities"));
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::super::elf::tests::file;
    use super::*;
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;

    fn put(folder: &Path, name: &str, content: impl AsRef<[u8]>, mode: u32) -> PathBuf {
        let path = folder.join(name);
        fs::write(&path, content).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        path
    }

    #[test]
    fn programs_are_found_like_a_shell_does() {
        let dir = tempfile::tempdir().unwrap();
        let (one, two) = (dir.path().join("one"), dir.path().join("two"));
        fs::create_dir_all(one.join("folder")).unwrap();
        fs::create_dir_all(&two).unwrap();
        put(&one, "data", "", 0o644);
        put(&one, "both", "", 0o644);
        let both = put(&two, "both", "", 0o755);
        let path = std::env::join_paths([&one, &two]).unwrap();
        let find = |name: &str| find_in(OsStr::new(name), &path);
        assert_eq!(find("both").unwrap(), both);
        assert_eq!(find(both.to_str().unwrap()).unwrap(), both);
        let here = find_in(OsStr::new("Cargo.toml"), OsStr::new("")).unwrap_err();
        assert!(here.to_string().starts_with("./Cargo.toml is not executable"), "{here}");
        for (name, code, why) in [
            ("none", 127, "none was not found"),
            ("", 127, "was not found"),
            ("./both", 127, "was not found"),
            ("data", 126, "is not executable"),
            ("folder", 126, "is a folder"),
        ] {
            let error = find(name).unwrap_err();
            assert_eq!(error.exit_code(), code, "{name}");
            assert!(error.to_string().contains(why), "{error}");
        }
    }

    #[test]
    fn errors_of_execve_have_the_codes_of_a_shell() {
        use nix::errno::Errno;
        for (errno, code) in [
            (Errno::ENOENT, 127),
            (Errno::EACCES, 126),
            (Errno::ENOEXEC, 126),
            (Errno::ETXTBSY, 126),
            (Errno::ENOMEM, 125),
        ] {
            let error = io::Error::from_raw_os_error(errno as i32);
            assert_eq!(
                CannotExecute::from_io(Path::new("/p"), error).exit_code(),
                code,
                "{errno}"
            );
        }
    }

    #[test]
    fn programs_that_ignore_the_shim_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let linker = (3, &b"/lib64/ld-linux-x86-64.so.2\0"[..]);
        let shim = Shim::find(Some(&put(dir.path(), "shim.so", file(&[]), 0o644))).unwrap();
        let check = |name: &str, content: Vec<u8>, mode| {
            let program = put(dir.path(), name, content, mode);
            check(&program, &shim, &mut io::sink()).map_err(|error| error.to_string())
        };
        assert_eq!(check("dynamic", file(&[linker]), 0o755), Ok(()));
        let error = check("static", file(&[(1, b"code")]), 0o755).unwrap_err();
        assert!(
            error.contains("static is statically linked") && error.contains("dynamically linked build"),
            "{error}"
        );
        let error = check("musl", file(&[(3, b"/lib/ld-musl-x86_64.so.1\0")]), 0o755).unwrap_err();
        assert!(error.contains("musl"), "{error}");
        let mut other = file(&[linker]);
        other[18] ^= 1;
        let error = check("other", other, 0o755).unwrap_err();
        assert!(error.contains("another processor"), "{error}");
        let mut narrow = file(&[linker]);
        narrow[4] = 1;
        assert!(check("narrow", narrow, 0o755).unwrap_err().contains("word size"));

        // Scripts: the interpreter counts.
        let script = |interpreter: &str| format!("#! {interpreter} -x\necho\n").into_bytes();
        let folder = dir.path().display();
        assert_eq!(check("good.sh", script(&format!("{folder}/dynamic")), 0o755), Ok(()));
        let error = check("bad.sh", script(&format!("{folder}/static")), 0o755).unwrap_err();
        assert!(error.contains("static is statically linked"), "{error}");
        let error = check("nested.sh", script(&format!("{folder}/bad.sh")), 0o755).unwrap_err();
        assert!(error.contains("static is statically linked"), "{error}");
        assert_eq!(
            check("endless.sh", script(&format!("{folder}/endless.sh")), 0o755),
            Ok(())
        );
        assert_eq!(check("plain.sh", b"echo\n".to_vec(), 0o755), Ok(()));

        // A set-id bit for the caller's own ids gives no privileges.
        assert_eq!(check("own", file(&[linker]), 0o6755), Ok(()));
        if getuid().is_root() {
            let program = put(dir.path(), "setuid", file(&[linker]), 0o755);
            for (mode, bit) in [(0o4755, "set-user-id"), (0o2755, "set-group-id")] {
                std::os::unix::fs::chown(&program, Some(12345), Some(12345)).unwrap();
                fs::set_permissions(&program, Permissions::from_mode(mode)).unwrap();
                let error = super::check(&program, &shim, &mut io::sink()).unwrap_err().to_string();
                assert!(error.contains(bit), "{error}");
            }
        }
    }
}
