// SPDX-License-Identifier: MIT OR Apache-2.0

//! PCI functions that are bound to vfio-pci (`include/uapi/linux/vfio.h`): open a function, map its BARs, create
//! dma-bufs.

use std::ffi::{c_int, c_void, CString};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::io::{retry_on_intr, Errno};
use rustix::ioctl::{ioctl, opcode, Ioctl, IoctlOutput, Opcode};

use super::Region;

/// Numbers of ioctls: `_IO(VFIO_TYPE, VFIO_BASE + n)`.
const TYPE: u8 = b';';
const GET_API_VERSION: u8 = 100;
const SET_IOMMU: u8 = 102;
const GROUP_GET_STATUS: u8 = 103;
const GROUP_SET_CONTAINER: u8 = 104;
const GROUP_GET_DEVICE_FD: u8 = 106;
const DEVICE_GET_REGION_INFO: u8 = 108;
const DEVICE_FEATURE: u8 = 117;
const DEVICE_BIND_IOMMUFD: u8 = 118;

/// `VFIO_API_VERSION`
const API_VERSION: c_int = 0;
/// `VFIO_TYPE1v2_IOMMU`
const TYPE1V2: usize = 3;
/// `VFIO_GROUP_FLAGS_VIABLE`
const VIABLE: u32 = 1;
/// `VFIO_REGION_INFO_FLAG_MMAP`
const CAN_MAP: u32 = 1 << 2;
/// `VFIO_PCI_CONFIG_REGION_INDEX`
const CONFIG_REGION: u32 = 7;
/// `VFIO_DEVICE_FEATURE_GET`
const FEATURE_GET: u32 = 1 << 16;
/// `VFIO_DEVICE_FEATURE_DMA_BUF`
const FEATURE_DMA_BUF: u32 = 11;
/// `PCI_COMMAND` and its bit `PCI_COMMAND_MEMORY`.
const COMMAND: u64 = 0x04;
const COMMAND_MEMORY: u16 = 0x2;

/// `struct vfio_group_status`
#[repr(C)]
#[derive(Default)]
struct GroupStatus {
    argsz: u32,
    flags: u32,
}

/// `struct vfio_region_info`
#[repr(C)]
#[derive(Default)]
struct RegionInfo {
    argsz: u32,
    flags: u32,
    index: u32,
    cap_offset: u32,
    size: u64,
    offset: u64,
}

/// `struct vfio_device_bind_iommufd`, the fields that all kernels have.
#[repr(C)]
#[derive(Default)]
struct BindIommufd {
    argsz: u32,
    flags: u32,
    iommufd: i32,
    out_devid: u32,
}

/// `struct vfio_region_dma_range`
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct DmaRange {
    offset: u64,
    length: u64,
}

/// `struct vfio_device_feature` with a `struct vfio_device_feature_dma_buf` of one range as data.
#[repr(C)]
struct DmaBufFeature {
    argsz: u32,
    flags: u32,
    region_index: u32,
    open_flags: u32,
    feature_flags: u32,
    nr_ranges: u32,
    range: DmaRange,
}

/// An ioctl of VFIO. Its number does not contain the size of the argument. The output is the return value.
struct Call<const NUMBER: u8>(*mut c_void);

// SAFETY: the opcode is that of the kernel's header, IS_MUTATING allows the kernel to write to the argument, and the
// output does not depend on the argument.
unsafe impl<const NUMBER: u8> Ioctl for Call<NUMBER> {
    type Output = c_int;
    const IS_MUTATING: bool = true;

    fn opcode(&self) -> Opcode {
        opcode::none(TYPE, NUMBER)
    }

    fn as_ptr(&mut self) -> *mut c_void {
        self.0
    }

    unsafe fn output_from_ptr(out: IoctlOutput, _argument: *mut c_void) -> rustix::io::Result<c_int> {
        Ok(out)
    }
}

/// Calls an ioctl.
///
/// # Safety
///
/// `argument` must be the argument of the ioctl: a number, or a pointer to memory that is valid for the kernel's reads
/// and writes.
unsafe fn call<const NUMBER: u8>(file: &File, argument: *mut c_void) -> io::Result<c_int> {
    // SAFETY: the caller's promise.
    Ok(retry_on_intr(|| unsafe { ioctl(file, Call::<NUMBER>(argument)) })?)
}

/// Returns the size of a structure, for its field `argsz`.
fn length_of<T>() -> u32 {
    size_of::<T>() as u32
}

/// Calls an ioctl that returns a new descriptor.
///
/// # Safety
///
/// As for [`call`]. The ioctl must return a new descriptor.
unsafe fn call_for_descriptor<const NUMBER: u8>(file: &File, argument: *mut c_void) -> io::Result<OwnedFd> {
    // SAFETY: the caller's promise.
    let fd = unsafe { call::<NUMBER>(file, argument) }?;
    if fd < 0 {
        return Err(Errno::BADF.into());
    }
    // SAFETY: the ioctl succeeded, so the descriptor is new and has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// The device nodes of a function.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Nodes {
    /// The function's own node, and iommufd.
    Device { node: PathBuf, iommufd: PathBuf },
    /// The node of the function's IOMMU group, and the container.
    Group { node: PathBuf, container: PathBuf },
}

impl Nodes {
    /// Returns the node of the IOMMU context. Functions with the same node must share one [`Iommu`].
    pub(crate) fn iommu(&self) -> &PathBuf {
        match self {
            Self::Device { iommufd, .. } => iommufd,
            Self::Group { node, .. } => node,
        }
    }
}

/// A failed step of opening a function.
#[derive(Debug)]
pub(crate) enum Failure {
    /// A device node cannot be opened.
    Node(PathBuf, io::Error),
    /// The IOMMU group has a device whose driver VFIO does not allow.
    NotViable,
    /// The platform's IOMMU cannot be used.
    Iommu(io::Error),
    /// Another step, with its name.
    Call(&'static str, io::Error),
}

/// An open IOMMU context. It has no mappings, so the functions cannot do DMA to memory.
#[derive(Debug)]
pub(crate) enum Iommu {
    Iommufd(File),
    // The fields are closed in their order.
    Group { group: File, _container: File },
}

/// An open function. No other program can open the function at the same time.
#[derive(Debug)]
pub(crate) struct Function {
    device: File,
    // Closed after the device.
    _iommu: Arc<Iommu>,
}

fn open(path: &Path) -> Result<File, Failure> {
    let file = OpenOptions::new().read(true).write(true).open(path);
    file.map_err(|error| Failure::Node(path.to_owned(), error))
}

impl Iommu {
    /// Opens the IOMMU context of a function.
    pub(crate) fn open(nodes: &Nodes) -> Result<Self, Failure> {
        match nodes {
            Nodes::Device { iommufd, .. } => open(iommufd).map(Self::Iommufd),
            Nodes::Group { node, container } => Self::of_group(open(container)?, open(node)?),
        }
    }

    fn of_group(container: File, group: File) -> Result<Self, Failure> {
        // SAFETY: the ioctl has no argument.
        let version = unsafe { call::<GET_API_VERSION>(&container, std::ptr::null_mut()) };
        match version {
            Ok(API_VERSION) => {}
            Ok(_) => return Err(Failure::Call("VFIO_GET_API_VERSION", Errno::PROTONOSUPPORT.into())),
            Err(error) => return Err(Failure::Call("VFIO_GET_API_VERSION", error)),
        }
        let mut status = GroupStatus {
            argsz: length_of::<GroupStatus>(),
            flags: 0,
        };
        // SAFETY: the kernel reads and writes a structure of `argsz` bytes.
        unsafe { call::<GROUP_GET_STATUS>(&group, (&raw mut status).cast()) }
            .map_err(|error| Failure::Call("VFIO_GROUP_GET_STATUS", error))?;
        if status.flags & VIABLE == 0 {
            return Err(Failure::NotViable);
        }
        let mut fd: c_int = container.as_raw_fd();
        // SAFETY: the kernel reads one int.
        unsafe { call::<GROUP_SET_CONTAINER>(&group, (&raw mut fd).cast()) }
            .map_err(|error| Failure::Call("VFIO_GROUP_SET_CONTAINER", error))?;
        // SAFETY: the argument is a number.
        unsafe { call::<SET_IOMMU>(&container, std::ptr::without_provenance_mut(TYPE1V2)) }.map_err(Failure::Iommu)?;
        Ok(Self::Group {
            group,
            _container: container,
        })
    }
}

impl Function {
    /// Opens the function that has the PCI address `name`, and enables its memory space. The kernel resets the
    /// function. `iommu` must be the IOMMU context of `nodes`.
    pub(crate) fn open(nodes: &Nodes, iommu: Arc<Iommu>, name: &str) -> Result<Self, Failure> {
        let device = match (&*iommu, nodes) {
            (Iommu::Iommufd(iommufd), Nodes::Device { node, .. }) => Self::by_device(iommufd, node)?,
            (Iommu::Group { group, .. }, Nodes::Group { .. }) => Self::by_group(group, name)?,
            _ => return Err(Failure::Call("opening by another IOMMU context", Errno::INVAL.into())),
        };
        let function = Self { device, _iommu: iommu };
        function
            .enable_memory()
            .map_err(|error| Failure::Call("enabling the memory", error))?;
        Ok(function)
    }

    fn by_device(iommufd: &File, node: &Path) -> Result<File, Failure> {
        let device = open(node)?;
        let mut bind = BindIommufd {
            argsz: length_of::<BindIommufd>(),
            iommufd: iommufd.as_raw_fd(),
            ..Default::default()
        };
        // SAFETY: the kernel reads `argsz` bytes and writes the field out_devid.
        let bound = unsafe { call::<DEVICE_BIND_IOMMUFD>(&device, (&raw mut bind).cast()) };
        match bound {
            Ok(_) => Ok(device),
            // Another program has opened the function, by this node or by its group.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EBUSY | libc::EINVAL)) => {
                Err(Failure::Node(node.to_owned(), Errno::BUSY.into()))
            }
            Err(error) => Err(Failure::Iommu(error)),
        }
    }

    fn by_group(group: &File, name: &str) -> Result<File, Failure> {
        let failed = |error| Failure::Call("VFIO_GROUP_GET_DEVICE_FD", error);
        let name = CString::new(name).map_err(|error| failed(error.into()))?;
        // SAFETY: the kernel reads a NUL-terminated string, writes nothing, and returns a new descriptor.
        let device = unsafe { call_for_descriptor::<GROUP_GET_DEVICE_FD>(group, name.as_ptr().cast_mut().cast()) };
        device.map(File::from).map_err(failed)
    }

    fn region(&self, index: u32) -> io::Result<RegionInfo> {
        let mut info = RegionInfo {
            argsz: length_of::<RegionInfo>(),
            index,
            ..Default::default()
        };
        // SAFETY: the kernel reads and writes a structure of `argsz` bytes; capabilities that do not fit are not
        // written.
        unsafe { call::<DEVICE_GET_REGION_INFO>(&self.device, (&raw mut info).cast()) }?;
        Ok(info)
    }

    /// Enables the function's memory space. If it is disabled, the kernel revokes the function's dma-bufs.
    fn enable_memory(&self) -> io::Result<()> {
        let config = self.region(CONFIG_REGION)?;
        let at = config.offset.checked_add(COMMAND).ok_or(Errno::OVERFLOW)?;
        let mut command = [0u8; 2];
        self.device.read_exact_at(&mut command, at)?;
        let enabled = u16::from_le_bytes(command) | COMMAND_MEMORY;
        self.device.write_all_at(&enabled.to_le_bytes(), at)
    }

    /// Maps a part of a BAR. The memory has no `struct page`: only the CPU can use the mapping.
    pub(crate) fn map(&self, bar: u8, offset: u64, len: usize) -> io::Result<Region> {
        let info = self.region(bar.into())?;
        if info.flags & CAN_MAP == 0 {
            return Err(Errno::OPNOTSUPP.into());
        }
        let end = offset.checked_add(len as u64).filter(|end| *end <= info.size);
        end.ok_or(Errno::INVAL)?;
        let start = info.offset.checked_add(offset).ok_or(Errno::OVERFLOW)?;
        Region::map(&self.device, start, len)
    }

    /// Creates a dma-buf of whole pages of a BAR.
    ///
    /// The dma-buf has one range: with an IOMMU, `dma_buf_phys_vec_to_sgt()` of Linux 7.2 and 7.3 maps all ranges to
    /// the start of the importer's I/O addresses.
    pub(crate) fn export(&self, bar: u8, offset: u64, length: u64) -> io::Result<OwnedFd> {
        let mut feature = DmaBufFeature {
            argsz: length_of::<DmaBufFeature>(),
            flags: FEATURE_GET | FEATURE_DMA_BUF,
            region_index: bar.into(),
            open_flags: (libc::O_RDWR | libc::O_CLOEXEC) as u32,
            feature_flags: 0,
            nr_ranges: 1,
            range: DmaRange { offset, length },
        };
        // SAFETY: the kernel reads a structure of `argsz` bytes with one range, writes nothing, and returns a new
        // descriptor.
        unsafe { call_for_descriptor::<DEVICE_FEATURE>(&self.device, (&raw mut feature).cast()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fmt::Write as _;
    use std::mem::offset_of;
    use std::process::Command;

    /// Returns C expressions and their expected values.
    fn expected() -> Vec<(&'static str, u64)> {
        let number = |number: u8| u64::from(opcode::none(TYPE, number));
        let data = "offsetof(struct vfio_device_feature, data)";
        let mut all = vec![
            ("VFIO_GET_API_VERSION", number(GET_API_VERSION)),
            ("VFIO_SET_IOMMU", number(SET_IOMMU)),
            ("VFIO_GROUP_GET_STATUS", number(GROUP_GET_STATUS)),
            ("VFIO_GROUP_SET_CONTAINER", number(GROUP_SET_CONTAINER)),
            ("VFIO_GROUP_GET_DEVICE_FD", number(GROUP_GET_DEVICE_FD)),
            ("VFIO_DEVICE_GET_REGION_INFO", number(DEVICE_GET_REGION_INFO)),
            ("VFIO_DEVICE_FEATURE", number(DEVICE_FEATURE)),
            ("VFIO_DEVICE_BIND_IOMMUFD", number(DEVICE_BIND_IOMMUFD)),
            ("VFIO_API_VERSION", API_VERSION as u64),
            ("VFIO_TYPE1v2_IOMMU", TYPE1V2 as u64),
            ("VFIO_GROUP_FLAGS_VIABLE", VIABLE.into()),
            ("VFIO_REGION_INFO_FLAG_MMAP", CAN_MAP.into()),
            ("VFIO_PCI_CONFIG_REGION_INDEX", CONFIG_REGION.into()),
            ("VFIO_DEVICE_FEATURE_GET", FEATURE_GET.into()),
            ("VFIO_DEVICE_FEATURE_DMA_BUF", FEATURE_DMA_BUF.into()),
            ("sizeof(struct vfio_group_status)", size_of::<GroupStatus>() as u64),
            ("sizeof(struct vfio_region_info)", size_of::<RegionInfo>() as u64),
            ("sizeof(struct vfio_region_dma_range)", size_of::<DmaRange>() as u64),
            (data, offset_of!(DmaBufFeature, region_index) as u64),
        ];
        macro_rules! fields {
            ($rust:ident, $c:literal, $base:expr, $($field:ident $(as $name:literal)?),*) => {$({
                #[allow(unused_mut, unused_assignments)]
                let mut name = stringify!($field);
                $(name = $name;)?
                all.push((
                    Box::leak(format!("offsetof(struct {}, {name})", $c).into_boxed_str()),
                    (offset_of!($rust, $field) - $base) as u64,
                ));
            })*};
        }
        let base = offset_of!(DmaBufFeature, region_index);
        fields!(GroupStatus, "vfio_group_status", 0, argsz, flags);
        fields!(
            RegionInfo,
            "vfio_region_info",
            0,
            argsz,
            flags,
            index,
            cap_offset,
            size,
            offset
        );
        fields!(
            BindIommufd,
            "vfio_device_bind_iommufd",
            0,
            argsz,
            flags,
            iommufd,
            out_devid
        );
        fields!(DmaRange, "vfio_region_dma_range", 0, offset, length);
        fields!(DmaBufFeature, "vfio_device_feature", 0, argsz, flags);
        fields!(
            DmaBufFeature,
            "vfio_device_feature_dma_buf",
            base,
            region_index,
            open_flags,
            feature_flags as "flags",
            nr_ranges,
            range as "dma_ranges"
        );
        all
    }

    /// Returns the path of a kernel header with dma-buf export, if kernel headers are installed.
    fn header() -> Option<PathBuf> {
        let folders = std::fs::read_dir("/usr/src").ok()?.flatten();
        let headers = folders.map(|folder| folder.path().join("include/uapi/linux/vfio.h"));
        headers
            .filter(|header| std::fs::read_to_string(header).is_ok_and(|text| text.contains("FEATURE_DMA_BUF")))
            .max()
    }

    #[test]
    fn numbers_and_structures_equal_those_of_kernel_header() {
        let Some(header) = header() else {
            assert!(
                !Path::new("/etc/p2pmem-kernel").exists(),
                "the sandbox has the headers of the kernel"
            );
            eprintln!("skipped: no kernel headers of 6.19 or later in /usr/src");
            return;
        };
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("linux")).unwrap();
        std::fs::copy(header, dir.path().join("linux/vfio.h")).unwrap();
        let expected = expected();
        let mut program =
            "#include <stddef.h>\n#include <stdio.h>\n#include <linux/vfio.h>\nint main(void) {\n".to_owned();
        for (expression, _) in &expected {
            writeln!(program, "printf(\"%llu\\n\", (unsigned long long)({expression}));").unwrap();
        }
        program += "return 0; }\n";
        let (source, binary) = (dir.path().join("program.c"), dir.path().join("program"));
        std::fs::write(&source, program).unwrap();
        // An installed uapi header has no annotations for the compiler, but this file of the kernel's source has some.
        let mut compile = Command::new("cc");
        compile.args(["-D__counted_by(x)=", "-D__user=", "-I"]).arg(dir.path());
        let compiled = compile.arg(&source).arg("-o").arg(&binary).output().unwrap();
        assert!(
            compiled.status.success(),
            "{}",
            String::from_utf8_lossy(&compiled.stderr)
        );
        let printed = String::from_utf8(Command::new(&binary).output().unwrap().stdout).unwrap();
        let printed: Vec<u64> = printed.lines().map(|line| line.parse().unwrap()).collect();
        assert_eq!(printed.len(), expected.len());
        for ((expression, ours), theirs) in expected.iter().zip(printed) {
            assert_eq!(*ours, theirs, "{expression}");
        }
    }

    #[test]
    fn other_files_are_refused() {
        let null = PathBuf::from("/dev/null");
        let group = Nodes::Group {
            node: null.clone(),
            container: null.clone(),
        };
        let refused = |nodes: &Nodes| match Iommu::open(nodes) {
            Ok(iommu) => Function::open(nodes, Arc::new(iommu), "0000:03:00.0").unwrap_err(),
            Err(failure) => failure,
        };
        assert!(matches!(
            refused(&group),
            Failure::Call("VFIO_GET_API_VERSION", error) if error.raw_os_error() == Some(libc::ENOTTY)
        ));
        let device = Nodes::Device {
            node: null.clone(),
            iommufd: null.clone(),
        };
        assert!(matches!(
            refused(&device),
            Failure::Iommu(error) if error.raw_os_error() == Some(libc::ENOTTY)
        ));
        let missing = Nodes::Group {
            node: "/nonexistent/7".into(),
            container: null,
        };
        assert!(matches!(
            refused(&missing),
            Failure::Node(path, error) if path == Path::new("/nonexistent/7") && error.raw_os_error() == Some(libc::ENOENT)
        ));
        let iommufd = Arc::new(Iommu::Iommufd(File::open("/dev/null").unwrap()));
        assert!(matches!(
            Function::open(&group, iommufd.clone(), "0000:03:00.0"),
            Err(Failure::Call("opening by another IOMMU context", _))
        ));
        let function = Function {
            device: File::open("/dev/null").unwrap(),
            _iommu: iommufd,
        };
        for error in [
            function.export(2, 0, 4096).unwrap_err(),
            function.map(2, 0, 4096).err().unwrap(),
            function.enable_memory().unwrap_err(),
        ] {
            assert_eq!(error.raw_os_error(), Some(libc::ENOTTY));
        }
    }
}
