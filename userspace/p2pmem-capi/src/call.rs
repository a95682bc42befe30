// SPDX-License-Identifier: MIT OR Apache-2.0

//! Implementation of the C functions in safe Rust: requests, providers, dma-bufs.

use std::ffi::{c_char, c_int, c_uint};
use std::io;
use std::os::fd::OwnedFd;

use p2pmem::abi::P2PMEM_MAX_PARTS;
use p2pmem::{
    Backend, Capability, Client, Device, DmaBuf, PathClass, PciAddr, Provider, ProviderKind, Request, Strategy,
};
use p2pmem_c_sys::{count, Failure};

use crate::sys::{
    p2pmem_provider_info, P2PMEM_BACKEND_MODULE, P2PMEM_BACKEND_SYSFS, P2PMEM_BACKEND_VFIO, P2PMEM_CAN_CLEAR,
    P2PMEM_CAN_DIRECT_IO, P2PMEM_CAN_DMABUF, P2PMEM_CAN_MAP, P2PMEM_CAN_PLACE, P2PMEM_CAN_QUOTAS, P2PMEM_CAN_REVOKE,
    P2PMEM_CAN_RULES, P2PMEM_CAN_SHARE, P2PMEM_KIND_IS_ADOPTED, P2PMEM_KIND_IS_OWN, P2PMEM_KIND_IS_REGISTERED,
    P2PMEM_KIND_IS_VFIO, P2PMEM_PARTS_ALL, P2PMEM_PROVIDER_IS_EXPORTABLE, P2PMEM_PROVIDER_IS_PAGELESS,
    P2PMEM_PROVIDER_IS_REMOVING, P2PMEM_WANT_PREFER, P2PMEM_WANT_UPSTREAM,
};

/// A descriptor that cannot be duplicated: EBADF for a number that is not a descriptor.
pub(crate) fn no_descriptor(fd: c_int, error: &io::Error) -> Failure {
    let errno = error.raw_os_error().unwrap_or(libc::EIO);
    let text = match errno {
        libc::EBADF => format!("{fd} is not a descriptor"),
        _ => format!("cannot duplicate the descriptor: {error}"),
    };
    Failure::new(errno, text)
}

/// A request from C, with the names of its clients.
#[derive(Debug, Default)]
pub(crate) struct Want {
    pub(crate) size: u64,
    pub(crate) align: u64,
    pub(crate) provider: u32,
    pub(crate) flags: u32,
    pub(crate) max_class: u32,
    pub(crate) parts: u32,
    pub(crate) near: Vec<String>,
}

impl Want {
    pub(crate) fn request(&self) -> Result<Request, Failure> {
        if self.flags & !(P2PMEM_WANT_PREFER | P2PMEM_WANT_UPSTREAM) != 0 {
            return Err(Failure::argument(format!("unknown flags {:#x}", self.flags)));
        }
        let near: Result<Vec<_>, _> = self.near.iter().map(|name| Client::resolve(name)).collect();
        let mut request = Request::new(self.size).align(self.align).near(near?);
        if self.flags & P2PMEM_WANT_UPSTREAM != 0 {
            if self.parts != 0 {
                return Err(Failure::argument(
                    "P2PMEM_WANT_UPSTREAM chooses one provider: parts must be 0",
                ));
            }
            request = request.strategy(Strategy::Upstream);
        }
        request = match self.parts {
            0 => request,
            P2PMEM_PARTS_ALL => request.strategy(Strategy::Stripe),
            parts if parts > P2PMEM_MAX_PARTS => {
                return Err(Failure::argument(format!(
                    "{parts} parts: at most {P2PMEM_MAX_PARTS} are possible"
                )));
            }
            parts => request.strategy(Strategy::Stripe).parts(parts),
        };
        if self.provider != 0 {
            let prefer = self.flags & P2PMEM_WANT_PREFER != 0;
            request = if prefer {
                request.prefer(self.provider)
            } else {
                request.provider(self.provider)
            };
        }
        if self.max_class != 0 {
            let class = (self.max_class as usize)
                .checked_sub(1)
                .and_then(|at| PathClass::ALL.get(at));
            let class = class.ok_or_else(|| Failure::argument(format!("{} is not a path class", self.max_class)))?;
            request = request.max_class(*class);
        }
        Ok(request)
    }
}

impl Want {
    /// Converts the request for a stripe of at most `capacity` parts.
    pub(crate) fn stripe(&self, capacity: usize) -> Result<Request, Failure> {
        let most = P2PMEM_MAX_PARTS as usize;
        match self.parts {
            0 => Err(Failure::argument("a stripe of 0 parts")),
            P2PMEM_PARTS_ALL if capacity < most => Err(Failure::argument(format!(
                "capacity is {capacity}, and there may be {most} parts"
            ))),
            P2PMEM_PARTS_ALL => self.request(),
            parts if parts as usize > capacity => Err(Failure::argument(format!(
                "capacity is {capacity}, and {parts} parts are requested"
            ))),
            _ => self.request(),
        }
    }
}

/// Returns the backend with the number P2PMEM_BACKEND_*.
pub(crate) fn backend(number: c_uint) -> Result<Backend, Failure> {
    match number {
        P2PMEM_BACKEND_MODULE => Ok(Backend::Module),
        P2PMEM_BACKEND_SYSFS => Ok(Backend::Sysfs),
        P2PMEM_BACKEND_VFIO => Ok(Backend::Vfio),
        _ => Err(Failure::argument(format!("{number} is not a backend"))),
    }
}

/// Returns the number of a device's backend, P2PMEM_BACKEND_*; 0 for a backend that this library does not know.
pub(crate) fn backend_number(backend: Backend) -> c_int {
    let number = match backend {
        Backend::Module => P2PMEM_BACKEND_MODULE,
        Backend::Sysfs => P2PMEM_BACKEND_SYSFS,
        Backend::Vfio => P2PMEM_BACKEND_VFIO,
        _ => 0,
    };
    number as c_int
}

/// Returns the capabilities of a backend, P2PMEM_CAN_* bits.
pub(crate) fn capabilities(backend: Backend) -> c_int {
    let bits = backend.capabilities().iter().map(|capability| match capability {
        Capability::Mapping => P2PMEM_CAN_MAP,
        Capability::DirectIo => P2PMEM_CAN_DIRECT_IO,
        Capability::DmaBuf => P2PMEM_CAN_DMABUF,
        Capability::Rules => P2PMEM_CAN_RULES,
        Capability::Quotas => P2PMEM_CAN_QUOTAS,
        Capability::Revoke => P2PMEM_CAN_REVOKE,
        Capability::Placement => P2PMEM_CAN_PLACE,
        Capability::Sharing => P2PMEM_CAN_SHARE,
        Capability::Clearing => P2PMEM_CAN_CLEAR,
        _ => 0,
    });
    bits.fold(0, |all, bit| all | bit) as c_int
}

/// Returns a dma-buf of any driver. `device` is the PCI address of the function that has the memory, if it is known.
pub(crate) fn dmabuf(fd: OwnedFd, device: Option<&str>) -> Result<DmaBuf, Failure> {
    let device = device
        .map(str::parse::<PciAddr>)
        .transpose()
        .map_err(|error| Failure::argument(error.to_string()))?;
    let dmabuf = DmaBuf::from_fd(fd)?;
    Ok(match device {
        Some(device) => dmabuf.of_device(device),
        None => dmabuf,
    })
}

/// Returns the class of the path between a dma-buf and a client, P2PMEM_CLASS_*.
pub(crate) fn path_class(dmabuf: &DmaBuf, client: &str) -> Result<c_int, Failure> {
    let class = dmabuf.path_to(&Client::resolve(client)?)?.class;
    // The number of a class is its index in PathClass::ALL plus 1.
    let index = PathClass::ALL.iter().position(|other| *other == class);
    Ok(index.map_or(0, |index| count(index + 1)))
}

/// Returns a string in a fixed array, always with a NUL.
fn chars<const N: usize>(text: &str) -> [c_char; N] {
    let mut chars = [0; N];
    for (to, from) in chars.iter_mut().zip(text.bytes().take(N - 1)) {
        *to = c_char::from_ne_bytes([from]);
    }
    chars
}

/// Converts a number that may be unknown: C has -1 for an unknown one.
fn signed(number: Option<u32>) -> i32 {
    number.and_then(|n| i32::try_from(n).ok()).unwrap_or(-1)
}

fn provider_info(provider: &Provider) -> p2pmem_provider_info {
    let flag = |bit, set| if set { bit } else { 0 };
    p2pmem_provider_info {
        id: provider.id,
        kind: match provider.kind {
            ProviderKind::Own => P2PMEM_KIND_IS_OWN,
            ProviderKind::Adopted => P2PMEM_KIND_IS_ADOPTED,
            ProviderKind::Registered => P2PMEM_KIND_IS_REGISTERED,
            ProviderKind::Vfio => P2PMEM_KIND_IS_VFIO,
            _ => 0,
        },
        flags: flag(P2PMEM_PROVIDER_IS_EXPORTABLE, provider.exportable)
            | flag(P2PMEM_PROVIDER_IS_PAGELESS, provider.pageless)
            | flag(
                P2PMEM_PROVIDER_IS_REMOVING,
                provider.state != p2pmem::ProviderState::Live,
            ),
        buffers: provider.buffers,
        bar: signed(provider.bar),
        numa_node: signed(provider.numa_node),
        size: provider.size,
        free: provider.free,
        largest: provider.largest,
        address: chars(&provider.addr.to_string()),
        driver: chars(provider.driver.as_deref().unwrap_or_default()),
    }
}

pub(crate) fn providers(device: &Device) -> Result<Vec<p2pmem_provider_info>, Failure> {
    Ok(device.providers()?.iter().map(provider_info).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use p2pmem::fake::Fake;
    use std::ffi::CStr;
    use std::os::fd::AsFd;

    #[test]
    fn want_converts_to_request() {
        let want = Want {
            size: 4096,
            provider: 2,
            flags: P2PMEM_WANT_PREFER,
            max_class: 2,
            near: vec!["0000:04:00.0".into()],
            ..Want::default()
        };
        let near: p2pmem::PciAddr = "0000:04:00.0".parse().unwrap();
        let wanted = Request::new(4096)
            .near([near])
            .prefer(2)
            .max_class(PathClass::SameSwitch);
        assert_eq!(want.request().unwrap(), wanted);
        for bad in [
            Want {
                flags: 8,
                ..Want::default()
            },
            Want {
                parts: 17,
                ..Want::default()
            },
            Want {
                parts: 2,
                flags: P2PMEM_WANT_UPSTREAM,
                ..Want::default()
            },
            Want {
                max_class: 99,
                ..Want::default()
            },
            Want {
                near: vec!["no/such".into()],
                ..Want::default()
            },
        ] {
            let failure = bad.request().unwrap_err();
            assert!([libc::EINVAL, libc::ENODEV].contains(&failure.errno), "{failure:?}");
        }
    }

    #[test]
    fn backends_have_numbers_and_capabilities() {
        for number in 1..=3 {
            assert_eq!(backend_number(backend(number).unwrap()), number as c_int);
        }
        assert_eq!(backend(4).unwrap_err().errno, libc::EINVAL);
        assert_eq!(capabilities(Backend::Module), 511);
        assert_eq!(
            capabilities(Backend::Sysfs) as c_uint,
            P2PMEM_CAN_MAP | P2PMEM_CAN_DIRECT_IO
        );
        assert_eq!(
            capabilities(Backend::Vfio) as c_uint,
            P2PMEM_CAN_MAP | P2PMEM_CAN_DMABUF
        );
        let refused = Fake::example()
            .device_of(Backend::Sysfs)
            .alloc_stripe(&Request::new(4096).strategy(Strategy::Stripe));
        let failure = Failure::from(refused.unwrap_err());
        assert_eq!(failure.errno, libc::EOPNOTSUPP);
        assert!(
            failure.text.contains("sysfs") && failure.remedy.is_some(),
            "{failure:?}"
        );
    }

    #[test]
    fn dma_bufs_of_any_origin_are_accepted() {
        let shared = Fake::example()
            .device()
            .alloc(&Request::new(8192))
            .unwrap()
            .share()
            .unwrap();
        let copy = || shared.as_fd().try_clone_to_owned().unwrap();
        let own = dmabuf(copy(), Some("0000:03:00.0")).unwrap();
        assert_eq!(
            (own.size(), own.device().unwrap().to_string()),
            (8192, "0000:03:00.0".into())
        );
        assert_eq!(path_class(&own, "ffff:ff:1f.7").unwrap_err().errno, libc::ENODEV);
        let unknown = dmabuf(copy(), None).unwrap();
        assert_eq!(path_class(&unknown, "0000:03:00.0").unwrap_err().errno, libc::EINVAL);
        assert_eq!(dmabuf(copy(), Some("mlx5_0")).unwrap_err().errno, libc::EINVAL);
        let null = std::fs::File::open("/dev/null").unwrap();
        assert_eq!(dmabuf(null.into(), None).unwrap_err().errno, libc::EINVAL);
    }

    #[test]
    fn providers_have_all_fields() {
        let all = providers(&Fake::example().device()).unwrap();
        assert_eq!(all.len(), 3);
        let address = all[0].address.map(|c| c.to_ne_bytes()[0]);
        assert_eq!(CStr::from_bytes_until_nul(&address).unwrap(), c"0000:03:00.0");
        assert_eq!((all[0].kind, all[0].bar, all[2].kind, all[2].bar), (1, 2, 2, -1));
        assert_eq!(all[0].flags, P2PMEM_PROVIDER_IS_EXPORTABLE);
        assert_eq!(chars::<4>("abcdef").map(|c| c as u8), *b"abc\0");
    }
}
