// SPDX-License-Identifier: MIT OR Apache-2.0

//! The life of the Debian packages on a clean Debian: installed and purged. In a long run they are used in a guest, and built
//! for the next kernel, too.
//!
//! The machine is a folder. Commands run in it by `chroot`, and guests boot from it with its own init. A guest's changes
//! are dropped after the boot.

use std::collections::BTreeSet;
use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use p2pmem_guest::in_time;
use p2pmem_guest::limits::is_long;
use p2pmem_vm::accelerator::Accelerator;
use p2pmem_vm::dmesg;
use p2pmem_vm::kernel::{self, write_vmlinux};
use p2pmem_vm::process::{Process, Stdin};
use p2pmem_vm::vm::folder;

use crate::lanes::Alone;

/// The tests.
pub const ALONE: &[(&str, Alone)] = &[("packages::install-upgrade-purge", life)];

/// The time limit of a step, long enough for a first run that builds and downloads everything.
const STEP: Duration = Duration::from_secs(2400);
/// The time limit of a guest: it boots all of Debian, and runs the checks. While other guests run, it has a part of the processors, and a
/// second run of the test would take a quarter of an hour.
const GUEST: Duration = Duration::from_secs(900);
/// The PCI address of the guest's ivshmem device.
const PROVIDER: &str = "0000:01:00.0";
/// The packages, and how they are purged.
const PACKAGES: &str =
    "p2pmem-dkms p2pmem-utils p2pmem-recorder libp2pmem0 libp2pmem-async0 libp2pmem-dev python3-p2pmem";
/// `apt-get` in the machine. Recommended packages are left out: they would be half of what is installed.
const APT: &str = "apt-get -q -y -o APT::Install-Recommends=false -o APT::Keep-Downloaded-Packages=true";
/// The folder of clean Debians.
const CACHE: &str = "/build/packages";
/// Files that Debian's own programs keep, by the beginning of the path: logs, the state of dpkg, apt, DKMS and debconf, and
/// caches. The key and certificate for module signatures are DKMS's, and stay for other modules.
const DEBIANS: &[&str] = &[
    "/etc/.pwd.lock",
    "/etc/group-",
    "/etc/gshadow-",
    "/etc/passwd-",
    "/etc/shadow-",
    "/etc/subgid-",
    "/etc/subuid-",
    "/etc/ld.so.cache",
    "/var/cache/apt/",
    "/var/cache/debconf/",
    "/var/cache/ldconfig/",
    "/var/lib/apt/",
    "/var/lib/dkms/mok.key",
    "/var/lib/dkms/mok.pub",
    "/var/lib/dpkg/",
    "/var/log/",
];

fn life() -> Result<()> {
    let debs = build()?;
    let clean = clean_root(&debs)?;
    let machine = Machine::new(&clean)?;
    let release = kernel::release()?;
    let next = fs::read_to_string("/etc/p2pmem-kernel-next")?.trim().to_owned();
    // The accounts of the checks belong to the machine, not to the packages.
    machine.works("useradd alice && useradd bob")?;
    let (packages, before) = (machine.packages()?, machine.files()?);
    let etc = machine.works(ETC)?;

    machine.keep_metadata_of(&release)?;
    let said = machine.works(&format!("{APT} install /mnt/*.deb"))?;
    let missing = said.lines().find(|line| line.starts_with("p2pmem: "));
    ensure!(missing.is_none(), "{missing:?}: {said}");
    machine.is_built_for(&release)?;
    machine.works(&format!(
        "usermod -aG p2pmem alice && printf '[[publish]]\\ndevice = \"{PROVIDER}\"\\n' >/etc/p2pmem/providers.toml"
    ))?;
    if !is_long() {
        println!("packages: using them in a guest and the upgrade of the kernel, ten minutes, are part of a long run");
    } else {
        machine.boots(&release)?;
        if next == release {
            println!("packages: {release} is of the newest series, so the upgrade of the kernel is not tested");
        } else {
            upgrade(&machine, &release, &next)?;
        }
    }
    machine.give_metadata()?;

    machine.works(&format!("{APT} purge {PACKAGES}"))?;
    // What came with them: dependencies, and the next kernel.
    let others: Vec<_> = machine.packages()?.difference(&packages).cloned().collect();
    machine.works(&format!("{APT} purge {}", others.join(" ")))?;
    let left: Vec<_> = machine.files()?.difference(&before).cloned().collect();
    ensure!(left.is_empty(), "these files remain: {}", left.join(" "));
    let now = machine.works(ETC)?;
    ensure!(now == etc, "files in /etc have changed:\nbefore\n{etc}\nafter\n{now}");
    Ok(())
}

/// Installs the next kernel, for which DKMS builds the module, and boots it.
fn upgrade(machine: &Machine, release: &str, next: &str) -> Result<()> {
    // Without the sources of the next kernel, the message names their package. With them, DKMS builds the module.
    let series = next.split('.').take(2).collect::<Vec<_>>().join(".");
    let source = format!("linux-source-{series}");
    let kernel = format!("linux-image-{next}/trixie-backports linux-headers-{next}/trixie-backports");
    let (installed, said) = machine.run(&format!("{APT} install {kernel}"))?;
    let named = said
        .lines()
        .find(|line| line.starts_with("p2pmem: ") && line.contains(&source));
    ensure!(
        named.is_some_and(|line| line.contains("apt-get install")),
        "{source} is not named: {said}"
    );
    ensure!(!installed, "DKMS built the module without {source}: {said}");
    machine.keep_metadata_of(next)?;
    machine.works(&format!("{APT} install {source}/trixie-backports"))?;
    machine.is_built_for(next)?;
    machine.is_built_for(release)?;
    machine.boots(next)
}

/// Prints a hash of each file in `/etc`, except those of [`DEBIANS`], and the accounts, except the recorder's, which stays because it
/// owns recordings, and the group of Debian's libibverbs1.
const ETC: &str = "cd /etc && accounts='passwd shadow group gshadow' &&
    find . -xdev -type f ! -name '*-' ! -name ld.so.cache ! -name .pwd.lock ! -name passwd ! -name shadow ! -name group \\
        ! -name gshadow -exec sha256sum {} + | sort -k2 && grep -v -e ^p2pmem-recorder: -e ^rdma: $accounts";

/// Builds the packages, which lintian checks. Returns the files.
fn build() -> Result<Vec<PathBuf>> {
    let out = host(&["tools/make-deb"])?;
    let debs: Vec<PathBuf> = out
        .lines()
        .filter(|line| line.ends_with(".deb"))
        .map(|line| top().join(line))
        .collect();
    ensure!(debs.len() == PACKAGES.split(' ').count(), "{out}");
    Ok(debs)
}

/// Returns the folder of a clean Debian.
fn clean_root(debs: &[PathBuf]) -> Result<PathBuf> {
    let mut argv = vec!["tests/suites/packages/clean-root"];
    for deb in debs {
        argv.push(deb.to_str().context("path")?);
    }
    let out = host(&argv)?;
    Ok(PathBuf::from(out.lines().last().context("no folder")?))
}

/// Returns the checkout's folder.
fn top() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../..")
}

/// Runs a command in the checkout, which has to succeed. Returns its output.
fn host(argv: &[&str]) -> Result<String> {
    let (fine, said) = run(argv)?;
    ensure!(fine, "{}: {said}", argv.join(" "));
    Ok(said)
}

/// Runs a command in the checkout. Returns whether it succeeded, and its output.
fn run(argv: &[&str]) -> Result<(bool, String)> {
    let dir = folder()?;
    let cd = ["bash", "-c", "cd \"$0\" && exec \"$@\""];
    let top = top();
    let argv: Vec<String> = cd
        .into_iter()
        .chain([top.to_str().context("path")?])
        .chain(argv.iter().copied())
        .map(str::to_owned)
        .collect();
    let mut process = Process::start("a step", &argv, Stdin::default(), &dir.path().join("log"), false)?;
    let ended = process.wait_until(Instant::now() + STEP)?;
    in_time!(ended, "{} took more than {STEP:?}: {}", argv.join(" "), process.log());
    let status = process.ended()?.context("no exit status")?;
    Ok((status.success(), process.log()))
}

/// Runs a command in a folder, as root, with the file systems that programs expect: the folder, the folder of archives,
/// the folder of packages, and the command.
const CHROOT: &str = r#"
set -e
root=$0
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount --bind /sys "$root/sys"
mount -t tmpfs tmpfs "$root/tmp"
mount -t tmpfs tmpfs "$root/run"
mount --bind "$1" "$root/var/cache/apt/archives"
mount --bind "$2" "$root/mnt"
# Guests boot without an initramfs.
exec chroot "$root" /usr/bin/env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root \
    LC_ALL=C.UTF-8 DEBIAN_FRONTEND=noninteractive INITRD=No bash -c "$3"
"#;

/// A clean Debian and what is changed in it.
struct Machine {
    clean: PathBuf,
    root: Layer,
}

impl Machine {
    fn new(clean: &Path) -> Result<Machine> {
        let root = Layer::new(vec![clean.join("system")])?;
        let clean = clean.to_owned();
        Ok(Machine { clean, root })
    }

    /// Runs a shell command in the machine. Returns whether it succeeded, and its output.
    fn run(&self, command: &str) -> Result<(bool, String)> {
        let root = self.root.path();
        let (archives, debs) = (self.clean.join("archives"), top().join("build/deb"));
        let [root, archives, debs] = [&root, &archives, &debs].map(|path| path.to_str().context("path"));
        let unshare = "unshare --mount --pid --fork --kill-child=KILL --propagation=unchanged bash -c";
        let argv: Vec<&str> = unshare
            .split(' ')
            .chain([CHROOT, root?, archives?, debs?, command])
            .collect();
        run(&argv)
    }

    /// Runs a shell command that has to succeed. Returns its output.
    fn works(&self, command: &str) -> Result<String> {
        let (fine, said) = self.run(command)?;
        ensure!(fine, "{command}: {said}");
        Ok(said)
    }

    /// Returns the names of the installed packages.
    fn packages(&self) -> Result<BTreeSet<String>> {
        let said = self.works("dpkg-query -W -f '${db:Status-Abbrev} ${binary:Package}\\n'")?;
        Ok(said
            .lines()
            .filter_map(|line| line.strip_prefix("ii  "))
            .map(str::to_owned)
            .collect())
    }

    /// Returns all files and folders, except those of [`DEBIANS`].
    fn files(&self) -> Result<BTreeSet<String>> {
        let root = self.root.path();
        let mut found = BTreeSet::new();
        let mut folders = vec![root.clone()];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(&folder).with_context(|| folder.display().to_string())? {
                let entry = entry?;
                let path = entry.path();
                let name = format!("/{}", path.strip_prefix(&root)?.display());
                if entry.file_type()?.is_dir() {
                    folders.push(path);
                }
                if !DEBIANS
                    .iter()
                    .any(|theirs| format!("{name}/").starts_with(theirs) || name.starts_with(theirs))
                {
                    found.insert(name);
                }
            }
        }
        Ok(found)
    }

    /// Puts the cached Rust metadata of a kernel where DKMS's build looks for it, if there is any.
    fn keep_metadata_of(&self, release: &str) -> Result<()> {
        let to = self.root.path().join(METADATA);
        fs::create_dir_all(&to)?;
        for folder in metadata(&self.clean.join("metadata"))? {
            if of_kernel(&folder)? == release {
                host(&[
                    "cp",
                    "-a",
                    folder.to_str().context("path")?,
                    to.to_str().context("path")?,
                ])?;
            }
        }
        Ok(())
    }

    /// Puts Rust metadata that was made here into the cache.
    fn give_metadata(&self) -> Result<()> {
        let cache = self.clean.join("metadata");
        for folder in metadata(&self.root.path().join(METADATA))? {
            let name = folder.file_name().context("name")?;
            let (to, new) = (cache.join(name), cache.join(format!("new-{}", std::process::id())));
            if !to.exists() {
                host(&[
                    "cp",
                    "-a",
                    folder.to_str().context("path")?,
                    new.to_str().context("path")?,
                ])?;
                // Another run may have put the same folder there.
                if fs::rename(&new, &to).is_err() {
                    fs::remove_dir_all(&new)?;
                }
            }
        }
        Ok(())
    }

    /// Checks that DKMS built, signed and installed the module for a kernel.
    fn is_built_for(&self, release: &str) -> Result<()> {
        let status = self.works("dkms status p2pmem")?;
        let version = self.works("dpkg-query -W -f '${Version}' p2pmem-dkms")?;
        let built =
            |line: &str| line.starts_with(&format!("p2pmem/{version}, {release},")) && line.ends_with(": installed");
        ensure!(status.lines().any(built), "dkms status: {status}");
        let field = |field: &str| self.works(&format!("modinfo -k {release} -F {field} p2pmem"));
        let (file, signer) = (field("filename")?, field("signer")?);
        ensure!(file.contains("/updates/dkms/"), "the module is {file}");
        ensure!(signer.contains("DKMS"), "the module is signed by {signer:?}");
        Ok(())
    }

    /// Boots the machine with a kernel of its own, and checks the installation.
    fn boots(&self, release: &str) -> Result<()> {
        let dir = folder()?;
        let image = dir.path().join("vmlinux");
        let layer = self.root.above()?;
        write_vmlinux(&layer.path().join(format!("boot/vmlinuz-{release}")), &image)?;
        let socket = dir.path().join("root.sock");
        let listener = UnixListener::bind(&socket)?;
        let root = layer.path();
        let virtiofsd = [
            "/usr/libexec/virtiofsd",
            "--fd=0",
            "--shared-dir",
            root.to_str().context("path")?,
            "--sandbox=none",
            "--seccomp=none",
            "--cache=always",
            "--log-level=warn",
        ]
        .map(String::from);
        let stdin = Stdin(Some(Stdio::from(OwnedFd::from(listener))));
        let _virtiofsd = Process::start("virtiofsd", &virtiofsd, stdin, &dir.path().join("virtiofsd.log"), false)?;
        let argv = qemu(&image, &socket, dir.path())?;
        let mut qemu = Process::start("QEMU", &argv, Stdin::default(), &dir.path().join("console"), false)?;
        let ended = qemu.wait_until(Instant::now() + GUEST)?;
        let console = qemu.log();
        in_time!(ended, "{release}: the guest took more than {GUEST:?}:\n{console}");
        judge(&console).with_context(|| format!("{release}:\n{console}"))
    }
}

/// The folder of the Rust metadata in the machine.
const METADATA: &str = "var/cache/p2pmem/build";

/// Returns the folders of Rust metadata in a folder.
fn metadata(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let entry = entry?;
        if entry.file_type()?.is_dir() && entry.file_name().to_string_lossy().starts_with("kdir-") {
            found.push(entry.path());
        }
    }
    Ok(found)
}

/// Returns the kernel release of Rust metadata.
fn of_kernel(folder: &Path) -> Result<String> {
    let file = folder.join("include/config/kernel.release");
    let text = fs::read_to_string(&file).with_context(|| file.display().to_string())?;
    Ok(text.trim().to_owned())
}

/// Checks what a guest printed.
fn judge(console: &str) -> Result<()> {
    let lines = || console.lines().map(str::trim_end);
    ensure!(lines().any(|line| line == "check: end"), "the checks did not end");
    let failed: Vec<_> = lines()
        .filter(|line| line.starts_with("check: ") && line.contains(": FAILED"))
        .collect();
    ensure!(failed.is_empty(), "{}", failed.join("\n"));
    ensure!(
        lines().filter(|line| line.ends_with(": ok")).count() >= 20,
        "checks are missing"
    );
    let bad: Vec<_> = lines()
        .filter(|line| line.starts_with("kernel: ") && dmesg::is_bad(line))
        .collect();
    ensure!(bad.is_empty(), "bad lines in the kernel log: {}", bad.join("\n"));
    Ok(())
}

/// Units of Debian's that the checks do not need, and that take seconds on an emulated processor.
const NOT_NEEDED: &[&str] = &[
    "apt-daily.timer",
    "apt-daily-upgrade.timer",
    "dpkg-db-backup.timer",
    "getty-static.service",
    "getty@tty1.service",
    "ldconfig.service",
    "serial-getty@ttyS0.service",
    "systemd-firstboot.service",
    "systemd-hwdb-update.service",
    "systemd-journal-catalog-update.service",
    "systemd-journal-flush.service",
];

/// The unit that runs the checks when the machine has booted, and powers it off.
const UNIT: &str = "[Unit]
After=multi-user.target
SuccessAction=poweroff-force
FailureAction=poweroff-force
[Service]
Type=oneshot
ImportCredential=p2pmem.check
ExecStart=/bin/bash %d/p2pmem.check PROVIDER
StandardOutput=tty
StandardError=tty
TTYPath=/dev/ttyS0
";

/// Returns QEMU's command line. The guest gets the unit and the checks as credentials, not as files of the machine.
fn qemu(image: &Path, root: &Path, dir: &Path) -> Result<Vec<String>> {
    let check = top().join("tests/suites/packages/check");
    let masks: Vec<_> = NOT_NEEDED.iter().map(|unit| format!("systemd.mask={unit}")).collect();
    let mut credentials = Vec::new();
    for (name, content) in [
        (
            "systemd.extra-unit.check.service",
            UNIT.replace("PROVIDER", PROVIDER).into_bytes(),
        ),
        (
            "p2pmem.check",
            fs::read(&check).with_context(|| check.display().to_string())?,
        ),
    ] {
        let file = dir.join(name);
        fs::write(
            &file,
            [format!("io.systemd.credential:{name}=").into_bytes(), content].concat(),
        )?;
        credentials.push("-smbios".to_owned());
        credentials.push(format!("type=11,path={}", file.display()));
    }
    let append = format!(
        "console=ttyS0 loglevel=4 root=rootfs rootfstype=virtiofs rw mitigations=off nokaslr cryptomgr.notests \
         no_timer_check tsc=reliable panic=-1 systemd.show_status=no systemd.wants=check.service {}",
        masks.join(" ")
    );
    let accelerator = Accelerator::chosen()?;
    let cpu = accelerator.cpu("EPYC");
    let options: &[(&str, &str)] = &[
        ("-display", "none"),
        ("-vga", "none"),
        ("-accel", accelerator.argument()),
        ("-cpu", &cpu),
        ("-smp", "2,sockets=2"),
        ("-m", "1G"),
        ("-object", "memory-backend-memfd,id=ram0,size=1G,share=on"),
        ("-machine", "q35,memory-backend=ram0"),
        ("-serial", "stdio"),
        ("-object", "memory-backend-memfd,id=shm0,size=64M,share=on"),
        ("-device", "pcie-root-port,id=rp0,bus=pcie.0,chassis=1,slot=1"),
        ("-device", "ivshmem-plain,bus=rp0,memdev=shm0"),
        ("-device", "vhost-user-fs-pci,bus=pcie.0,chardev=root,tag=rootfs"),
    ];
    let mut argv: Vec<String> = ["qemu-system-x86_64", "-nodefaults", "-no-user-config", "-no-reboot"]
        .map(String::from)
        .into();
    // The socket comes before the device that uses it.
    argv.extend(["-chardev".into(), format!("socket,id=root,path={}", root.display())]);
    argv.extend(
        options
            .iter()
            .flat_map(|(option, value)| [option.to_string(), value.to_string()]),
    );
    argv.extend(["-kernel".into(), image.display().to_string(), "-append".into(), append]);
    argv.extend(credentials);
    Ok(argv)
}

/// A folder whose content is that of other folders, until it is changed: an overlay, or a copy where there are none.
struct Layer {
    dir: tempfile::TempDir,
    /// The folders below the overlay, if it is one.
    below: Vec<PathBuf>,
    /// The mounts, in order.
    mounts: Vec<PathBuf>,
}

impl Layer {
    /// Makes a folder of folders that do not change, the first of which hides files of the others. Changes are in memory,
    /// unless the machine has little: a disk may take a minute to forget them.
    fn new(below: Vec<PathBuf>) -> Result<Layer> {
        let dir = tempfile::Builder::new().prefix("run-").tempdir_in(CACHE)?;
        let mut layer = Layer {
            dir,
            below: Vec::new(),
            mounts: Vec::new(),
        };
        let top = layer.dir.path().to_owned();
        if available_memory()? >= MEMORY {
            let size = format!("size={}", MEMORY * 3 / 4);
            layer.mount(&["-t", "tmpfs", "-o", &size, "tmpfs"], &top)?;
        }
        for name in ["root", "upper", "work"] {
            fs::create_dir(top.join(name))?;
        }
        let lower: Vec<_> = below.iter().map(|path| path.display().to_string()).collect();
        let (lower, top) = (lower.join(":"), top.display());
        let options = format!("lowerdir={lower},upperdir={top}/upper,workdir={top}/work");
        match layer.mount(&["-t", "overlay", "-o", &options, "overlay"], &layer.path()) {
            Ok(()) => layer.below = below,
            // The file system of the changes cannot carry an overlay, as in a container, whose folders are one.
            Err(why) => {
                ensure!(below.len() == 1, "{why:#}");
                host(&[
                    "cp",
                    "-a",
                    "--reflink=auto",
                    &format!("{lower}/."),
                    &layer.path().display().to_string(),
                ])?;
            }
        }
        Ok(layer)
    }

    fn mount(&mut self, what: &[&str], place: &Path) -> Result<()> {
        host(&[&["mount"], what, &[&*place.to_string_lossy()]].concat())?;
        self.mounts.push(place.to_owned());
        Ok(())
    }

    /// Makes another folder with the same content.
    fn above(&self) -> Result<Layer> {
        if self.below.is_empty() {
            return Layer::new(vec![self.path()]);
        }
        let upper = self.dir.path().join("upper");
        Layer::new([&[upper], &self.below[..]].concat())
    }

    /// Returns the folder.
    fn path(&self) -> PathBuf {
        self.dir.path().join("root")
    }
}

impl Drop for Layer {
    fn drop(&mut self) {
        for place in self.mounts.iter().rev() {
            // Where this fails, the mount ends with the sandbox's mount namespace.
            let _ = run(&["umount", "--lazy", &place.to_string_lossy()]);
        }
    }
}

/// The memory that has to be available for changes to be in memory. They take up to two thirds of it.
const MEMORY: u64 = 8 << 30;

/// Returns how much memory programs can get without swapping.
fn available_memory() -> Result<u64> {
    let info = fs::read_to_string("/proc/meminfo")?;
    let line = info
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))
        .context("MemAvailable")?;
    let kib: u64 = line.trim().trim_end_matches(" kB").parse().context("MemAvailable")?;
    Ok(kib << 10)
}
