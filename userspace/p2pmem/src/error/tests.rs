// SPDX-License-Identifier: MIT OR Apache-2.0

use super::*;

#[test]
fn messages_name_errno_and_reason() {
    let error = Error::Refused {
        operation: Operation::Alloc,
        errno: libc::ENOSPC,
        reason: Some("0000:04:00.0 has 4096 bytes free".into()),
    };
    assert_eq!(
        error.to_string(),
        "the allocation failed: No space left on device (ENOSPC): 0000:04:00.0 has 4096 bytes free"
    );
    assert_eq!(error.errno(), Some(libc::ENOSPC));
    assert_eq!(error.reason(), Some("0000:04:00.0 has 4096 bytes free"));
    assert!(error.remedy().unwrap().contains("request less"));
}

#[test]
fn missing_device_suggests_loading_the_module() {
    let error = Error::Open {
        path: "/dev/p2pmem".into(),
        error: io::Error::from_raw_os_error(libc::ENOENT),
    };
    assert_eq!(
        error.to_string(),
        "cannot open /dev/p2pmem: No such file or directory (ENOENT)"
    );
    assert!(error.remedy().unwrap().contains("modprobe p2pmem"));
}

#[test]
fn message_does_not_repeat_its_source() {
    let error = || io::Error::from_raw_os_error(libc::EACCES);
    let all = [
        Error::Open {
            path: "/dev/p2pmem".into(),
            error: error(),
        },
        Error::Io {
            what: "reading",
            offset: 0,
            error: error(),
        },
        Error::Admin {
            action: "read".into(),
            path: "/sys".into(),
            error: error(),
            status: None,
        },
    ];
    for error in all {
        let text = error.to_string();
        assert!(text.ends_with("Permission denied (EACCES)"), "{text}");
        assert!(std::error::Error::source(&error).is_none(), "{text}");
        assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{text}");
    }
}

#[test]
fn kinds_distinguish_errors_of_one_errno() {
    let refused = |operation, errno| Error::Refused {
        operation,
        errno,
        reason: None,
    };
    let kinds = [
        (refused(Operation::Alloc, libc::ENODEV), ErrorKind::NoProvider),
        (refused(Operation::Map, libc::ENODEV), ErrorKind::Removed),
        (refused(Operation::Stripe, libc::EACCES), ErrorKind::DeniedByRule),
        (refused(Operation::Import, libc::EACCES), ErrorKind::PermissionDenied),
        (refused(Operation::Alloc, libc::EDQUOT), ErrorKind::QuotaExceeded),
        (refused(Operation::Stats, libc::ENOENT), ErrorKind::NotFound),
        (refused(Operation::Info, libc::ENOTTY), ErrorKind::Incompatible),
        (refused(Operation::Free, libc::EDOM), ErrorKind::Other),
    ];
    for (error, kind) in kinds {
        assert_eq!(error.kind(), kind, "{error}");
    }
    let open = |path: &str| Error::Open {
        path: path.into(),
        error: io::Error::from_raw_os_error(libc::ENOENT),
    };
    assert_eq!(open("/dev/p2pmem").kind(), ErrorKind::ModuleMissing);
    for other in ["/data/samples", "/etc/p2pmem/10-users.toml", "/dev/nvme0n1"] {
        assert_eq!(open(other).kind(), ErrorKind::NotFound, "{other}");
        assert_eq!(open(other).remedy(), None, "{other}");
    }
}

#[test]
fn unknown_errnos_keep_their_number() {
    assert!(errno_text(libc::EDOM).ends_with("(errno 33)"));
}

#[test]
fn errno_524_of_an_rdma_driver_is_explained() {
    let error = Error::Register {
        what: "4096 bytes of buffer 1".into(),
        nic: "bnxt_re0".into(),
        method: RegistrationMethod::DmaBuf,
        errno: ENOTSUPP,
        reason: None,
    };
    assert!(
        error
            .to_string()
            .contains("not supported by the driver (ENOTSUPP, 524)"),
        "{error}"
    );
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.remedy().unwrap().contains("dma-bufs"), "{error}");
}

#[test]
fn remedy_of_open_error_depends_on_file() {
    for (path, errno, part) in [
        ("/dev/p2pmem", libc::EACCES, "join the group"),
        ("/dev/vfio/7", libc::EBUSY, "virtual machine"),
        ("/dev/iommu", libc::EACCES, "device node"),
        (
            "/sys/bus/pci/devices/0000:03:00.0/p2pmem/allocate",
            libc::EACCES,
            "access to the file",
        ),
        (
            "/sys/bus/pci/devices/0000:03:00.0/p2pmem/allocate",
            libc::ENOENT,
            "bind the driver",
        ),
    ] {
        let error = Error::Open {
            path: path.into(),
            error: io::Error::from_raw_os_error(errno),
        };
        assert!(error.remedy().unwrap().contains(part), "{error}: {:?}", error.remedy());
    }
}
