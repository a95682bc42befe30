// SPDX-License-Identifier: MIT OR Apache-2.0

//! Compares the structures with ucp/api/ucp.h, and moves bytes between two workers of this process, over TCP.

use std::mem::offset_of;
use std::time::{Duration, Instant};

use p2pmem_header_test::{in_sandbox, Program};
use p2pmem_verbs::Span;

use crate::abi::*;
use crate::{Context, Endpoint, Memory, Options, Request, UcxError, Worker, MAX_PACKED};

/// Longest wait of a test.
const LIMIT: Duration = Duration::from_secs(60);

#[test]
fn structures_constants_and_functions_match_header() {
    let mut program = Program::new("ucp/api/ucp.h");
    program.include("ucs/config/global_opts.h");
    let mut same = |what: &str, value: i128| program.same(what, value);
    macro_rules! layout {
        ($($structure:ident $name:literal: $($field:ident)*;)*) => {
            $(
                $(same(
                    &format!("offsetof({}, {})", $name, stringify!($field)),
                    offset_of!($structure, $field) as i128,
                );)*
                same(&format!("sizeof({})", $name), size_of::<$structure>() as i128);
            )*
        };
    }
    layout! {
        Params "ucp_params_t": field_mask features request_size request_init request_cleanup tag_sender_mask
            mt_workers_shared estimated_num_eps estimated_num_ppn name;
        WorkerParams "ucp_worker_params_t": field_mask thread_mode cpu_mask events user_data event_fd flags name
            am_alignment client_id;
        MemMapParams "ucp_mem_map_params_t": field_mask address length flags prot memory_type exported_memh_buffer;
        ErrorHandler "ucp_err_handler_t": cb arg;
        SocketAddress "ucs_sock_addr_t": addr addrlen;
        EpParams "ucp_ep_params_t": field_mask address err_mode err_handler user_data flags sockaddr conn_request name
            local_sockaddr;
        RequestParam "ucp_request_param_t": op_attr_mask flags request cb datatype user_data reply_buffer memory_type
            recv_info memh;
    }
    same("sizeof(ucs_status_t)", size_of::<Status>() as i128);
    for (name, value) in [
        ("UCS_OK", i128::from(OK)),
        ("UCS_INPROGRESS", IN_PROGRESS.into()),
        ("UCS_ERR_BUSY", ERR_BUSY.into()),
        ("UCS_ERR_LAST", ERR_LAST.into()),
        ("UCP_PARAM_FIELD_FEATURES", PARAM_FEATURES.into()),
        ("UCP_FEATURE_RMA", FEATURE_RMA.into()),
        ("UCP_FEATURE_WAKEUP", FEATURE_WAKEUP.into()),
        ("UCP_WORKER_PARAM_FIELD_THREAD_MODE", WORKER_PARAM_THREAD_MODE.into()),
        ("UCS_THREAD_MODE_SERIALIZED", THREAD_MODE_SERIALIZED.into()),
        ("UCP_MEM_MAP_PARAM_FIELD_ADDRESS", MEM_MAP_PARAM_ADDRESS.into()),
        ("UCP_MEM_MAP_PARAM_FIELD_LENGTH", MEM_MAP_PARAM_LENGTH.into()),
        ("UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE", MEM_MAP_PARAM_MEMORY_TYPE.into()),
        ("UCS_MEMORY_TYPE_HOST", MEMORY_TYPE_HOST.into()),
        ("UCP_EP_PARAM_FIELD_REMOTE_ADDRESS", EP_PARAM_REMOTE_ADDRESS.into()),
        (
            "UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE",
            EP_PARAM_ERR_HANDLING_MODE.into(),
        ),
        ("UCP_EP_PARAM_FIELD_ERR_HANDLER", EP_PARAM_ERR_HANDLER.into()),
        ("UCP_ERR_HANDLING_MODE_PEER", ERR_HANDLING_MODE_PEER.into()),
        ("UCP_EP_CLOSE_FLAG_FORCE", EP_CLOSE_FLAG_FORCE.into()),
        ("UCP_OP_ATTR_FIELD_FLAGS", OP_ATTR_FLAGS.into()),
        ("UCP_OP_ATTR_FIELD_MEMH", OP_ATTR_MEMH.into()),
    ] {
        same(name, value);
    }
    for function in [
        "void (*a)(unsigned *, unsigned *, unsigned *) = ucp_get_version",
        "const char *(*b)(ucs_status_t) = ucs_status_string",
        "ucs_status_t (*c)(const char *, const char *) = ucs_global_opts_set_value",
        "ucs_status_t (*d)(const char *, const char *, ucp_config_t **) = ucp_config_read",
        "ucs_status_t (*e)(ucp_config_t *, const char *, const char *) = ucp_config_modify",
        "void (*f)(ucp_config_t *) = ucp_config_release",
        "ucs_status_t (*g)(unsigned, unsigned, const ucp_params_t *, const ucp_config_t *, ucp_context_h *) = ucp_init_version",
        "void (*h)(ucp_context_h) = ucp_cleanup",
        "ucs_status_t (*i)(ucp_context_h, const ucp_worker_params_t *, ucp_worker_h *) = ucp_worker_create",
        "void (*j)(ucp_worker_h) = ucp_worker_destroy",
        "ucs_status_t (*k)(ucp_worker_h, ucp_address_t **, size_t *) = ucp_worker_get_address",
        "void (*l)(ucp_worker_h, ucp_address_t *) = ucp_worker_release_address",
        "unsigned (*m)(ucp_worker_h) = ucp_worker_progress",
        "ucs_status_t (*n)(ucp_worker_h, int *) = ucp_worker_get_efd",
        "ucs_status_t (*o)(ucp_worker_h) = ucp_worker_arm",
        "ucs_status_t (*p)(ucp_context_h, const ucp_mem_map_params_t *, ucp_mem_h *) = ucp_mem_map",
        "ucs_status_t (*q)(ucp_context_h, ucp_mem_h) = ucp_mem_unmap",
        "ucs_status_t (*r)(ucp_context_h, ucp_mem_h, void **, size_t *) = ucp_rkey_pack",
        "void (*s)(void *) = ucp_rkey_buffer_release",
        "ucs_status_t (*t)(ucp_worker_h, const ucp_ep_params_t *, ucp_ep_h *) = ucp_ep_create",
        "ucs_status_ptr_t (*u)(ucp_ep_h, const ucp_request_param_t *) = ucp_ep_close_nbx",
        "ucs_status_ptr_t (*v)(ucp_ep_h, const ucp_request_param_t *) = ucp_ep_flush_nbx",
        "ucs_status_t (*w)(ucp_ep_h, const void *, ucp_rkey_h *) = ucp_ep_rkey_unpack",
        "void (*x)(ucp_rkey_h) = ucp_rkey_destroy",
        "ucs_status_ptr_t (*y)(ucp_ep_h, const void *, size_t, uint64_t, ucp_rkey_h, const ucp_request_param_t *) = ucp_put_nbx",
        "ucs_status_ptr_t (*z)(ucp_ep_h, void *, size_t, uint64_t, ucp_rkey_h, const ucp_request_param_t *) = ucp_get_nbx",
        "ucs_status_t (*A)(void *) = ucp_request_check_status",
        "void (*B)(void *) = ucp_request_free",
        "ucp_err_handler_cb_t C; void (*D)(void *, ucp_ep_h, ucs_status_t) = (__typeof__(C))0",
    ] {
        program.line(&format!("{function};"));
    }
    program.check();
}

/// Returns a context over TCP within this machine. `None` outside the sandbox if UCX is not installed.
fn context() -> Option<Context> {
    match Context::new(&Options::new("lo", "tcp")) {
        Err(UcxError::NotInstalled(why)) if !in_sandbox() => {
            eprintln!("skipped: {why}");
            None
        }
        context => Some(context.unwrap()),
    }
}

/// Makes progress on all workers until the request is done.
fn complete(request: &Request, workers: &[&Worker]) -> crate::Result<()> {
    let deadline = Instant::now() + LIMIT;
    loop {
        if let Some(result) = request.result() {
            return result;
        }
        assert!(Instant::now() < deadline, "{request:?} does not end");
        for worker in workers {
            worker.progress();
        }
    }
}

fn bytes_of(span: &Span) -> Vec<u8> {
    let mut bytes = vec![0; span.len()];
    span.read(0, &mut bytes);
    bytes
}

#[test]
fn bytes_move_in_both_directions() {
    let (Some(own), Some(other)) = (context(), context()) else {
        return;
    };
    let (from, to) = (Span::host(1 << 20).unwrap(), Span::host(1 << 20).unwrap());
    let pattern: Vec<u8> = (0..1 << 20).map(|i: u32| (i % 251) as u8).collect();
    from.write(0, &pattern);
    let (client, server) = (Worker::new(&own).unwrap(), Worker::new(&other).unwrap());
    let local = Memory::map(&own, &from, 0, from.len()).unwrap();
    // All but the first page.
    let remote = Memory::map(&other, &to, 4096, to.len() - 4096).unwrap();
    assert_eq!((remote.address(), remote.len()), (to.address() + 4096, to.len() - 4096));
    // SAFETY: the address is that of a worker of this process.
    let endpoint = unsafe { Endpoint::new(&client, &server.address().unwrap()) }.unwrap();
    // SAFETY: the key is that of memory of this process.
    let key = unsafe { endpoint.key(&remote.key().unwrap()) }.unwrap();
    let workers = [&client, &server];
    let puts: Vec<_> = [(8, 8), (100_000, 300_000)]
        .map(|(at, len)| key.put(&local, at, len, to.address() + 4096 + at as u64).unwrap())
        .into();
    complete(&endpoint.flush(), &workers).unwrap();
    for put in &puts {
        complete(put, &workers).unwrap();
    }
    let moved = bytes_of(&to);
    assert!(moved[4104..4112] == pattern[8..16]);
    assert!(moved[104_096..404_096] == pattern[100_000..400_000]);
    for rest in [&moved[..4104], &moved[4112..104_096], &moved[404_096..]] {
        assert!(rest.iter().all(|byte| *byte == 0));
    }
    complete(
        &key.get(&local, 500_000, 300_000, to.address() + 104_096).unwrap(),
        &workers,
    )
    .unwrap();
    assert!(bytes_of(&from)[500_000..800_000] == pattern[100_000..400_000]);
    assert_eq!(endpoint.failure(), None);
    // A transfer whose request and memory are dropped continues, and the worker keeps the memory.
    drop((key.put(&local, 0, 1 << 19, to.address() + 4096).unwrap(), local, from));
    complete(&endpoint.flush(), &workers).unwrap();
    assert!(bytes_of(&to)[4096..4096 + 500_000] == pattern[..500_000]);
}

#[test]
fn a_worker_that_ends_is_an_error_of_the_connection() {
    let (Some(own), Some(other)) = (context(), context()) else {
        return;
    };
    let span = Span::host(1 << 16).unwrap();
    let (client, server) = (Worker::new(&own).unwrap(), Worker::new(&other).unwrap());
    let (local, remote) = (
        Memory::map(&own, &span, 0, span.len()).unwrap(),
        Memory::map(&other, &span, 0, span.len()).unwrap(),
    );
    // SAFETY: the address is that of a worker of this process.
    let endpoint = unsafe { Endpoint::new(&client, &server.address().unwrap()) }.unwrap();
    // SAFETY: the key is that of memory of this process.
    let key = unsafe { endpoint.key(&remote.key().unwrap()) }.unwrap();
    complete(
        &key.put(&local, 0, 4096, span.address() + 8192).unwrap(),
        &[&client, &server],
    )
    .unwrap();
    complete(&endpoint.flush(), &[&client, &server]).unwrap();
    drop((server, remote, other));
    // Transfers end with an error, or cannot begin.
    let deadline = Instant::now() + LIMIT;
    while endpoint.failure().is_none() {
        assert!(Instant::now() < deadline, "the connection does not end");
        let _ = key.put(&local, 0, 4096, span.address() + 8192);
        client.progress();
        client.wait(Duration::from_millis(1)).unwrap();
    }
    let failure = endpoint.failure().unwrap().to_string();
    assert!(failure.starts_with("the connection failed: "), "{failure}");
    assert!(complete(&endpoint.flush(), &[&client]).is_err());
}

#[test]
fn a_wait_ends_at_its_limit() {
    let Some(context) = context() else { return };
    let worker = Worker::new(&context).unwrap();
    let deadline = Instant::now() + LIMIT;
    while worker.progress() {
        assert!(Instant::now() < deadline, "the worker has no end of progress");
    }
    worker.wait(Duration::from_millis(1)).unwrap();
    assert!(Instant::now() < deadline);
}

#[test]
fn devices_and_transports_that_do_not_exist_are_errors() {
    if context().is_none() {
        return;
    }
    for (devices, transports) in [("none:1", "rc"), ("lo", "none")] {
        // UCX checks the names when it creates a context or a worker.
        let error = Context::new(&Options::new(devices, transports)).and_then(|context| Worker::new(&context));
        let error = error.unwrap_err().to_string();
        assert!(error.contains("failed: ") && error.contains("UCX status -"), "{error}");
    }
    let error = Context::new(&Options::new("lo\0", "tcp")).unwrap_err();
    assert!(matches!(error, UcxError::Name(_)), "{error}");
}

#[test]
fn damaged_addresses_and_keys_are_refused() {
    let Some(context) = context() else { return };
    let worker = Worker::new(&context).unwrap();
    let memory = Memory::map(&context, &Span::host(4096).unwrap(), 0, 4096).unwrap();
    let (address, key) = (worker.address().unwrap(), memory.key().unwrap());
    assert!(address.len() <= MAX_PACKED && key.len() <= MAX_PACKED);
    // SAFETY: an address of this process, or bytes of another kind, version, or checksum.
    let refused = |bytes: &[u8]| match unsafe { Endpoint::new(&worker, bytes) } {
        Err(UcxError::Packed { why, .. }) => why,
        other => panic!("{other:?}"),
    };
    for at in 0..address.len() {
        let mut damaged = address.clone();
        damaged[at] ^= 1;
        assert!(refused(&damaged).contains("checksum"), "{at}");
        refused(&address[..at]);
    }
    refused(&vec![0; MAX_PACKED + 1]);
    assert!(refused(&key).contains("another kind"));
    let mut older = address.clone();
    older.truncate(older.len() - 4);
    older[2] -= 1;
    older.extend_from_slice(&crc32c::crc32c(&older).to_le_bytes());
    assert!(refused(&older).contains("the same version on both nodes"));
    // SAFETY: the address is that of a worker of this process.
    let endpoint = unsafe { Endpoint::new(&worker, &address) }.unwrap();
    // SAFETY: an address is of another kind than a key.
    let key = unsafe { endpoint.key(&address) };
    assert!(matches!(key, Err(UcxError::Packed { .. })));
}

#[test]
fn the_handlers_of_signals_stay_those_of_the_program() {
    let handler = |signal| {
        // SAFETY: all fields of sigaction are integers and pointers that may be 0.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        // SAFETY: with the null pointer, the call changes nothing, and `action` is valid for writing.
        assert_eq!(unsafe { libc::sigaction(signal, std::ptr::null(), &mut action) }, 0);
        action.sa_sigaction
    };
    // Other tests may have loaded UCX before.
    let Some(_context) = context() else { return };
    assert_eq!(handler(libc::SIGFPE), libc::SIG_DFL);
    assert_eq!(handler(libc::SIGILL), libc::SIG_DFL);
}
