BEGIN TRANSACTION;
CREATE TABLE device (
	id INTEGER NOT NULL, 
	kind TEXT NOT NULL, 
	name TEXT NOT NULL, 
	capability TEXT NOT NULL, 
	sm_count INTEGER NOT NULL, 
	shared_memory_per_block INTEGER NOT NULL, 
	memory_bytes BIGINT NOT NULL, 
	CONSTRAINT pk_device PRIMARY KEY (id), 
	CONSTRAINT uq_device_kind UNIQUE (kind, name, capability, sm_count, shared_memory_per_block)
);
INSERT INTO "device" VALUES(1,'cuda','NVIDIA H200','9.0',132,232448,150000000000);
CREATE TABLE flce_tune_revision (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT flce_tune_revision_pkc PRIMARY KEY (version_num)
);
INSERT INTO "flce_tune_revision" VALUES('0001');
CREATE TABLE job (
	number INTEGER NOT NULL, 
	id TEXT NOT NULL, 
	idempotency_key TEXT, 
	spec JSON NOT NULL, 
	state VARCHAR(20) NOT NULL, 
	priority INTEGER NOT NULL, 
	message TEXT NOT NULL, 
	created_at DATETIME NOT NULL, 
	started_at DATETIME, 
	finished_at DATETIME, 
	lease_owner TEXT, 
	lease_expires_at DATETIME, 
	cancel_requested BOOLEAN NOT NULL, 
	attempts INTEGER NOT NULL, 
	CONSTRAINT pk_job PRIMARY KEY (number), 
	CONSTRAINT uq_job_id UNIQUE (id), 
	CONSTRAINT uq_job_idempotency_key UNIQUE (idempotency_key)
);
INSERT INTO "job" VALUES(1,'45e85436-5455-48cd-8145-5844894b27d6','k','{"device": "cpu", "problems": [{"tokens": 8, "hidden": 8, "vocab": 8}]}','running',2,'','2026-11-29 21:49:18.264716','2026-11-29 21:49:18.268560',NULL,'worker','2026-11-29 21:49:18.268560',0,1);
CREATE TABLE job_event (
	id INTEGER NOT NULL, 
	job_id TEXT NOT NULL, 
	kind TEXT NOT NULL, 
	data JSON NOT NULL, 
	created_at DATETIME NOT NULL, 
	CONSTRAINT pk_job_event PRIMARY KEY (id), 
	CONSTRAINT fk_job_event_job_id FOREIGN KEY(job_id) REFERENCES job (id)
);
INSERT INTO "job_event" VALUES(1,'45e85436-5455-48cd-8145-5844894b27d6','state','{"state": "queued"}','2026-11-29 21:49:18.264716');
INSERT INTO "job_event" VALUES(2,'45e85436-5455-48cd-8145-5844894b27d6','state','{"state": "running", "owner": "worker", "attempt": 1}','2026-11-29 21:49:18.268560');
INSERT INTO "job_event" VALUES(3,'45e85436-5455-48cd-8145-5844894b27d6','measurement','{"done": 1}','2026-11-29 21:49:18.271728');
CREATE TABLE measurement (
	id INTEGER NOT NULL, 
	device_id INTEGER NOT NULL, 
	toolchain_id INTEGER NOT NULL, 
	problem_id INTEGER NOT NULL, 
	tokens BIGINT NOT NULL, 
	config TEXT NOT NULL, 
	status VARCHAR(20) NOT NULL, 
	samples_ms JSON NOT NULL, 
	median_ms DOUBLE, 
	spread_ms DOUBLE, 
	workspace_bytes BIGINT, 
	registers INTEGER, 
	spills INTEGER, 
	shared_memory INTEGER, 
	errors JSON NOT NULL, 
	clocks_mhz INTEGER, 
	message TEXT NOT NULL, 
	created_at DATETIME NOT NULL, 
	CONSTRAINT pk_measurement PRIMARY KEY (id), 
	CONSTRAINT ck_measurement_time_iff_ok CHECK ((status = 'ok') = (median_ms IS NOT NULL)), 
	CONSTRAINT ck_measurement_time_is_finite CHECK (median_ms > 0 AND median_ms < 1e300), 
	CONSTRAINT fk_measurement_device_id FOREIGN KEY(device_id) REFERENCES device (id), 
	CONSTRAINT fk_measurement_problem_id FOREIGN KEY(problem_id) REFERENCES problem (id), 
	CONSTRAINT fk_measurement_toolchain_id FOREIGN KEY(toolchain_id) REFERENCES toolchain (id)
);
INSERT INTO "measurement" VALUES(1,1,1,1,16384,'{"chunk":2048,"strategy":"chunked"}','ok','[1.5, 1.75]',1.5,0.125,1073741824,NULL,NULL,NULL,'{"dx": 0.001}',NULL,'','2026-11-29 21:49:18.193689');
INSERT INTO "measurement" VALUES(2,1,1,1,16384,'{"strategy":"full"}','crash','[]',NULL,NULL,NULL,NULL,NULL,NULL,'{}',NULL,'out of memory','2026-11-29 21:49:18.225069');
CREATE TABLE miss (
	device_id INTEGER NOT NULL, 
	problem_id INTEGER NOT NULL, 
	tokens BIGINT NOT NULL, 
	count BIGINT NOT NULL, 
	last_seen DATETIME NOT NULL, 
	CONSTRAINT pk_miss PRIMARY KEY (device_id, problem_id), 
	CONSTRAINT fk_miss_device_id FOREIGN KEY(device_id) REFERENCES device (id), 
	CONSTRAINT fk_miss_problem_id FOREIGN KEY(problem_id) REFERENCES problem (id)
);
INSERT INTO "miss" VALUES(1,1,5000,3,'2026-11-01 00:00:00.000000');
CREATE TABLE problem (
	id INTEGER NOT NULL, 
	mode TEXT NOT NULL, 
	dtype TEXT NOT NULL, 
	accumulate TEXT NOT NULL, 
	hidden INTEGER NOT NULL, 
	vocab INTEGER NOT NULL, 
	token_bucket BIGINT NOT NULL, 
	features TEXT NOT NULL, 
	CONSTRAINT pk_problem PRIMARY KEY (id), 
	CONSTRAINT uq_problem_mode UNIQUE (mode, dtype, accumulate, hidden, vocab, token_bucket, features)
);
INSERT INTO "problem" VALUES(1,'train','bfloat16','fp32',4096,128256,16384,'bias');
CREATE TABLE toolchain (
	id INTEGER NOT NULL, 
	torch TEXT NOT NULL, 
	triton TEXT NOT NULL, 
	cuda TEXT NOT NULL, 
	driver TEXT NOT NULL, 
	kernel_hash TEXT NOT NULL, 
	CONSTRAINT pk_toolchain PRIMARY KEY (id), 
	CONSTRAINT uq_toolchain_torch UNIQUE (torch, triton, cuda, driver, kernel_hash)
);
INSERT INTO "toolchain" VALUES(1,'2.13.0','3.7.1','13.0','580.1','abc123');
CREATE TABLE winner (
	measurement_id INTEGER NOT NULL, 
	default_ms DOUBLE, 
	eager_ms DOUBLE, 
	verified BOOLEAN NOT NULL, 
	updated_at DATETIME NOT NULL, 
	CONSTRAINT pk_winner PRIMARY KEY (measurement_id), 
	CONSTRAINT fk_winner_measurement_id FOREIGN KEY(measurement_id) REFERENCES measurement (id)
);
INSERT INTO "winner" VALUES(1,2.0,3.0,1,'2026-11-29 21:49:18.246752');
CREATE INDEX ix_job_state_priority_number ON job (state, priority, number);
CREATE INDEX ix_job_event_job_id_id ON job_event (job_id, id);
CREATE INDEX ix_measurement_device_id ON measurement (device_id);
CREATE INDEX ix_measurement_problem_id_device_id ON measurement (problem_id, device_id);
COMMIT;
