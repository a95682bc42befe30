// SPDX-License-Identifier: MIT OR Apache-2.0

//! The kernel to boot: the stock kernel, an uncompressed ELF image inside Debian's `vmlinuz`, or the debug kernel.
//!
//! QEMU enters an ELF kernel directly (PVH). This saves about one second, in which the emulated processor would
//! decompress the image. The image is the one that the kernel's own decompressor would put into memory.

use std::env;
use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

/// The environment variable with the folder of the debug kernel, as `tools/debug-kernel path` prints it.
pub const DEBUG_KERNEL: &str = "P2PMEM_DEBUG_KERNEL";
/// The factor for all time limits on the debug kernel.
const DEBUG_TIME_FACTOR: u32 = 4;

/// A kernel, and the settings that depend on it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kernel {
    /// The ELF image.
    pub image: PathBuf,
    /// The folder for `/lib/modules`, if it is not the sandbox's own.
    pub modules: Option<PathBuf>,
    /// The factor for all time limits.
    pub time_factor: u32,
    /// Whether the kernel looks for leaks and wrong locking by itself ([`crate::checks`]).
    pub checks: bool,
}

impl Kernel {
    /// Returns the kernel that the sandbox was made for.
    ///
    /// # Errors
    ///
    /// Those of [`release`] and [`vmlinux`].
    pub fn stock() -> Result<Kernel> {
        Ok(Kernel::image(vmlinux(&release()?)?))
    }

    /// Returns a kernel from its image alone. Its modules are the sandbox's.
    pub fn image(image: PathBuf) -> Kernel {
        Kernel {
            image,
            modules: None,
            time_factor: 1,
            checks: false,
        }
    }

    /// Returns the debug kernel that [`DEBUG_KERNEL`] names, or `None` if the variable is not set or is `none`.
    ///
    /// # Errors
    ///
    /// The folder has no debug kernel.
    pub fn debug() -> Result<Option<Kernel>> {
        let Some(folder) = env::var_os(DEBUG_KERNEL).filter(|folder| !folder.is_empty() && folder != "none") else {
            return Ok(None);
        };
        let folder = PathBuf::from(folder);
        let image = folder.join("vmlinux");
        ensure!(
            image.is_file(),
            "{DEBUG_KERNEL}: there is no debug kernel at {}: make debug-kernel",
            folder.display()
        );
        Ok(Some(Kernel {
            image,
            modules: Some(folder.join("modules")),
            time_factor: DEBUG_TIME_FACTOR,
            checks: true,
        }))
    }

    /// Returns the stock kernel with the modules in the folder `modules` of `folder`, as `tools/peer-kernel` makes it.
    ///
    /// # Errors
    ///
    /// Those of [`Kernel::stock`]; the folder does not exist.
    pub fn with_modules(folder: &Path) -> Result<Kernel> {
        let modules = folder.join("modules");
        ensure!(modules.is_dir(), "there are no modules at {}", modules.display());
        Ok(Kernel {
            modules: Some(modules),
            ..Kernel::stock()?
        })
    }

    /// Returns the kernel for a name: `stock`, `debug`, the path of an image, or the path of a folder of modules for
    /// the stock kernel.
    ///
    /// # Errors
    ///
    /// Those of [`Kernel::stock`], [`Kernel::debug`] and [`Kernel::with_modules`]; `debug` without [`DEBUG_KERNEL`].
    pub fn named(name: &str) -> Result<Kernel> {
        match name {
            "stock" => Kernel::stock(),
            "debug" => {
                Kernel::debug()?.with_context(|| format!("{DEBUG_KERNEL} is not set: where is the debug kernel?"))
            }
            path if Path::new(path).is_dir() => Kernel::with_modules(Path::new(path)),
            path => Ok(Kernel::image(path.into())),
        }
    }
}

/// Returns the release of the kernel that the sandbox was made for.
///
/// # Errors
///
/// `/etc/p2pmem-kernel` is missing: the program does not run in the sandbox.
pub fn release() -> Result<String> {
    let file = "/etc/p2pmem-kernel";
    let text = fs::read_to_string(file).with_context(|| format!("{file}: run this in the sandbox"))?;
    Ok(text.trim().to_owned())
}

/// Returns the uncompressed image of a kernel in `/boot`. Makes it in `/build` if it is missing there or older than the
/// kernel.
///
/// # Errors
///
/// The kernel is missing or of an unknown format, or the image cannot be written.
pub fn vmlinux(release: &str) -> Result<PathBuf> {
    let from = PathBuf::from(format!("/boot/vmlinuz-{release}"));
    let to = PathBuf::from(format!("/build/vmlinux-{release}"));
    let made = fs::metadata(&to).and_then(|m| m.modified());
    let source = fs::metadata(&from)
        .and_then(|m| m.modified())
        .with_context(|| from.display().to_string())?;
    if !made.is_ok_and(|made| made >= source) {
        write_vmlinux(&from, &to)?;
    }
    Ok(to)
}

/// Writes the uncompressed image of a kernel to a file.
///
/// # Errors
///
/// The kernel is missing or of an unknown format, or the image cannot be written.
pub fn write_vmlinux(from: &Path, to: &Path) -> Result<()> {
    let image = fs::read(from).with_context(|| from.display().to_string())?;
    let elf = extract(&image).with_context(|| from.display().to_string())?;
    let folder = to.parent().unwrap_or(Path::new("/"));
    let mut file = tempfile::NamedTempFile::new_in(folder).with_context(|| folder.display().to_string())?;
    file.write_all(&elf)?;
    // Another runner may write the same image at the same time: each one renames a complete file.
    file.persist(to)?;
    Ok(())
}

/// Takes the compressed kernel from a bzImage (x86 boot protocol 2.08 or later) and decompresses it.
///
/// # Errors
///
/// The input is not a bzImage, is damaged, or its compression is not zstd.
pub fn extract(image: &[u8]) -> Result<Vec<u8>> {
    let word = |at: usize| -> Result<usize> {
        let bytes = image.get(at..at + 4).context("too short for a bzImage")?;
        Ok(u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]) as usize)
    };
    ensure!(image.get(0x202..0x206) == Some(b"HdrS"), "no bzImage");
    let sectors = match image[0x1f1] {
        0 => 4,
        n => usize::from(n),
    };
    let start = (sectors + 1) * 512 + word(0x248)?;
    let payload = image
        .get(start..start.saturating_add(word(0x24c)?))
        .context("payload beyond the end")?;
    let mut elf = Vec::new();
    match payload {
        [0x28, 0xb5, 0x2f, 0xfd, ..] => {
            // The payload ends with the uncompressed size, which does not belong to the frame.
            let mut decoder = zstd::stream::read::Decoder::with_buffer(payload)?.single_frame();
            decoder.read_to_end(&mut elf).context("decompressing")?;
        }
        _ => bail!("the kernel is compressed with something other than zstd"),
    }
    ensure!(elf.starts_with(b"\x7fELF"), "the payload is no ELF image");
    Ok(elf)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(payload: &[u8]) -> Vec<u8> {
        let mut image = vec![0; 1024 + 64];
        image[0x1f1] = 1;
        image[0x202..0x206].copy_from_slice(b"HdrS");
        image[0x248..0x24c].copy_from_slice(&64u32.to_le_bytes());
        image[0x24c..0x250].copy_from_slice(&(payload.len() as u32).to_le_bytes());
        image.extend_from_slice(payload);
        image
    }

    #[test]
    fn payload_is_extracted() {
        let elf = b"\x7fELF and so on".repeat(100);
        let mut payload = zstd::encode_all(&elf[..], 3).unwrap();
        payload.extend_from_slice(&(elf.len() as u32).to_le_bytes());
        assert_eq!(extract(&image(&payload)).unwrap(), elf);
    }

    #[test]
    fn unsupported_images_are_rejected() {
        assert!(extract(b"").is_err());
        assert!(
            extract(&image(b"\x1f\x8bgzip"))
                .unwrap_err()
                .to_string()
                .contains("zstd")
        );
        let not_elf = zstd::encode_all(&b"plain"[..], 3).unwrap();
        assert!(extract(&image(&not_elf)).unwrap_err().to_string().contains("ELF"));
        let mut short = image(b"");
        short[0x24c] = 200;
        assert!(extract(&short).is_err());
    }
}
